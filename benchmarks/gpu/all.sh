#!/usr/bin/env bash
# Everything that an accelerator has to show, the most important first, in at most seven minutes:
#
#     benchmarks/gpu/all.sh                       # on one GPU
#     benchmarks/gpu/all.sh --device cpu --tiny   # the same code on a CPU; the figures mean nothing then
#
# Each part has a limit of its own, so that one that hangs leaves time for the others. Its output is kept in
# $OUT/<part>.log (a new folder without OUT). One line of JSON per part, and one with the counts at the end.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.:examples:benchmarks/gpu PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
PYTHON=${PYTHON:-python3}
OUT=${OUT:-$(mktemp -d)}
mkdir -p "$OUT"

# Seconds that a part may take.
PARTS=(correctness:110 stage_messages:80 training_step:95 activations:85 half_precision:50)

lines=()
ended=0
for part in "${PARTS[@]}"; do
    name=${part%%:*}
    begin=$SECONDS
    # With KILL: a rank that waits for a kernel does not hear TERM.
    timeout -s KILL "${part##*:}" "$PYTHON" "benchmarks/gpu/$name.py" "$@" >"$OUT/$name.log" 2>&1
    status=$?
    echo "== $name"
    tail -n 25 "$OUT/$name.log"
    figures=$(tail -n 1 "$OUT/$name.log")
    [[ $status -eq 0 && $figures == "{"* ]] && ended=$((ended + 1)) || figures=null
    lines+=("{\"part\": \"$name\", \"status\": $status, \"seconds\": $((SECONDS - begin)), \"figures\": $figures}")
done
echo "== all"
printf '%s\n' "${lines[@]}"
echo "{\"parts\": ${#lines[@]}, \"ended\": $ended, \"seconds\": $SECONDS}"
