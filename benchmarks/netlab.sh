#!/usr/bin/env bash
# Runs a command on the ranks of two "nodes" with a slow link between them, on one machine:
#
#     benchmarks/netlab.sh [--rate 200mbit] [--per-connection RATE] [--ranks-per-node 2] [--] COMMAND [ARGUMENT...]
#     benchmarks/netlab.sh python benchmarks/sharding.py
#
# A node is a network namespace with a host name of its own. Ranks of one node talk to each other at the speed of the
# machine. The only way between the nodes is a pair of virtual network cards, each of which sends at no more than the
# given rate (as `tc` writes it). With --per-connection no single connection is faster than that, as in the networks of
# large data centres (connections are told apart by six bits of a port, so that now and then two share the rate).
#
# Each rank finds the variables of torchrun in its environment, with LOCAL_WORLD_SIZE ranks to a node, and what has
# crossed the link in /sys/class/net/eth0/statistics. The output is that of rank 0, and what the others wrote if they
# fail. When one rank fails the others get some seconds, for their own errors, and are ended. The exit code is the worst
# of all ranks. Nothing stays behind.
#
# Needs root and `ip` and `tc` (package iproute2).
set -euo pipefail

RATE=200mbit
PER_CONNECTION=
RANKS_PER_NODE=2
GRACE_SECONDS=5 # for the others, after the first failure

fail() {
    echo "netlab: $1" >&2
    exit 2
}

while [[ $# -gt 0 && $1 == --* ]]; do
    case $1 in
        --rate | --per-connection | --ranks-per-node) [[ $# -ge 2 ]] || fail "$1 needs a value." ;;&
        --rate) RATE=$2 && shift 2 ;;
        --per-connection) PER_CONNECTION=$2 && shift 2 ;;
        --ranks-per-node) RANKS_PER_NODE=$2 && shift 2 ;;
        --) shift && break ;;
        *) fail "$1 is no option. There are --rate, --per-connection and --ranks-per-node." ;;
    esac
done
[[ $# -gt 0 ]] || fail "no command is given. Usage: netlab.sh [--rate R] [--ranks-per-node N] [--] COMMAND..."
[[ $RANKS_PER_NODE =~ ^[1-9][0-9]*$ ]] || fail "--ranks-per-node must be a positive number, but is $RANKS_PER_NODE."
[[ $(id -u) == 0 ]] || fail "network namespaces are made by root only, but this is $(id -un). Run it as root."
for tool in ip tc; do
    command -v "$tool" > /dev/null || fail "\`$tool\` is not installed. Install the package iproute2."
done

# Namespaces of other runs have other names; what runs in these was started here.
NODES=("netlab-$$-0" "netlab-$$-1")
OUTPUT=$(mktemp -d)
declare -A RANK_OF=() # by process

end_ranks() {
    local node
    kill "-$1" "${!RANK_OF[@]}" 2> /dev/null || true
    for node in "${NODES[@]}"; do
        ip netns pids "$node" 2> /dev/null | xargs -r kill "-$1" 2> /dev/null || true # also what ranks have started
    done
}

# Until no rank runs, but no longer than some seconds.
wait_some_time() {
    local turn
    for ((turn = 0; turn < 10 * GRACE_SECONDS; turn++)); do
        kill -0 "${!RANK_OF[@]}" 2> /dev/null || return 0
        sleep 0.1
    done
}

# What becomes of a rank.
note() {
    local rank=$1 code=$2
    ((code > 0)) || return 0
    echo "netlab: rank $rank ended with $code" >&2
    ((rank == 0)) || cat "$OUTPUT/$rank" >&2
    # Those that were ended here do not count.
    if ((worst == 0 || (code > worst && code != 143 && code != 137))); then
        worst=$code
    fi
}

clean_up() {
    trap - EXIT
    disown -a # they are ended without a word
    end_ranks KILL
    local node
    for node in "${NODES[@]}"; do
        ip netns del "$node" 2> /dev/null || true
    done
    rm -rf "$OUTPUT"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Commands of `tc`: a class with the rate of a connection for each value of six bits of the port it goes to.
per_connection() {
    local number filter="filter add dev eth0 parent 1: prio 1 protocol ip u32"
    echo "qdisc add dev eth0 root handle 1: htb"
    echo "class add dev eth0 parent 1: classid 1:fff htb rate $RATE quantum 60000"
    echo "filter add dev eth0 parent 1: prio 1 handle 2: protocol ip u32 divisor 64"
    for number in $(seq 0 63 | xargs printf "%x\n"); do
        echo "class add dev eth0 parent 1:fff classid 1:1$number htb rate 1mbit ceil $PER_CONNECTION quantum 60000"
        echo "$filter ht 2:$number: match u32 0 0 flowid 1:1$number"
    done
    echo "$filter ht 800:: match ip protocol 6 0xff hashkey mask 0x0000007e at 20 link 2:"
}

for node in "${NODES[@]}"; do
    ip netns add "$node" || fail "this machine does not let namespaces be made (a container needs CAP_SYS_ADMIN)."
done
ip link add eth0 netns "${NODES[0]}" type veth peer name eth0 netns "${NODES[1]}"
for number in 0 1; do
    node=${NODES[number]}
    ip -n "$node" addr add "10.77.0.$((number + 1))/24" dev eth0
    ip -n "$node" link set lo up
    ip -n "$node" link set eth0 up
    if [[ -z $PER_CONNECTION ]]; then
        echo "qdisc add dev eth0 root tbf rate $RATE burst 128kb latency 400ms"
    else
        per_connection
    fi | tc -n "$node" -batch - ||
        fail "\`tc\` does not take a rate of $RATE${PER_CONNECTION:+ and $PER_CONNECTION}. Write it like 200mbit."
done

export MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1
export WORLD_SIZE=$((2 * RANKS_PER_NODE)) LOCAL_WORLD_SIZE=$RANKS_PER_NODE GROUP_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=netlab
for ((rank = 0; rank < WORLD_SIZE; rank++)); do
    node=$((rank / RANKS_PER_NODE))
    place=("RANK=$rank" "LOCAL_RANK=$((rank % RANKS_PER_NODE))" "GROUP_RANK=$node")
    named=(unshare --uts sh -c 'hostname "$0" && exec "$@"' "node-$node")
    run=(env "${place[@]}" ip netns exec "${NODES[node]}" "${named[@]}" "$@")
    if ((rank == 0)); then
        "${run[@]}" &
    else
        "${run[@]}" > "$OUTPUT/$rank" 2>&1 &
    fi
    RANK_OF[$!]=$rank
done

worst=0
while [[ ${#RANK_OF[@]} -gt 0 && $worst == 0 ]]; do
    code=0
    wait -n -p process "${!RANK_OF[@]}" || code=$?
    note "${RANK_OF[$process]}" "$code"
    unset "RANK_OF[$process]"
done
if [[ ${#RANK_OF[@]} -gt 0 ]]; then
    # They may wait for the one that has failed, for ever.
    wait_some_time
    end_ranks TERM
    wait_some_time
    end_ranks KILL
    for process in "${!RANK_OF[@]}"; do
        code=0
        wait "$process" || code=$?
        note "${RANK_OF[$process]}" "$code"
    done
fi
exit "$worst"
