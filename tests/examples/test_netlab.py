"""The laboratory of two nodes, where this machine lets namespaces be made."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scripts import run_script
from test_runs import SMALL_GPT, TRAIN, train, weights

NETLAB = Path(__file__).parents[2] / "benchmarks" / "netlab.sh"
SAYS_WHO = 'echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, threads $OMP_NUM_THREADS"'
# Rank 3 is on the other node.
ASKS_THE_OTHER_NODE = """python3 - <<'END'
import os, socket
here = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.create_server(here) as server:
        print(server.accept()[0].recv(100).decode())
elif os.environ["RANK"] == "3":
    for _ in range(100):
        try:
            socket.create_connection(here).send(b"hello from rank 3")
            break
        except ConnectionRefusedError:
            __import__("time").sleep(0.05)
END
"""


def netlab(script: str, *options: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
    command = [NETLAB, *options, "bash", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)


def nodes() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def can_make_namespaces() -> bool:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    return netlab("true").returncode == 0


needs_namespaces = pytest.mark.skipif("not can_make_namespaces()", reason="needs root and iproute2")


@needs_namespaces
def test_each_rank_is_told_its_place_and_the_first_is_heard():
    assert netlab(SAYS_WHO).stdout == "0 of 4, 0 of 2, threads 1\n"
    assert netlab(f"{SAYS_WHO}; exit $RANK", "--ranks-per-node", "1").stderr.endswith("1 of 2, 0 of 1, threads 1\n")


@needs_namespaces
def test_nodes_reach_each_other():
    assert netlab(ASKS_THE_OTHER_NODE).stdout == "hello from rank 3\n"


@needs_namespaces
def test_it_ends_with_the_worst_exit_code_and_leaves_nothing_behind():
    before = nodes()
    done = netlab("[ $RANK != 2 ] || sleep 100; [ $RANK != 3 ] || echo bad luck; exit $RANK")
    assert done.returncode == 3
    assert "rank 3 ended with 3\nbad luck" in done.stderr
    assert nodes() == before


def compare_replicas(tmp_path):
    told = run_script(tmp_path, NETLAB.parent / "data_parallel.py", "--nodes", "--quick")
    found = json.loads(told.splitlines()[-1])
    assert found.keys() == {
        *("one_node_vs_ddp", "hierarchical_vs_ddp_200mbit", "hook_vs_ddp_200mbit"),
        *("slow_link_bytes_over_bound", "ddp_bytes_over_bound"),
    }
    # Not a time: the bytes are those of the algorithm, and some headers.
    assert found["slow_link_bytes_over_bound"] < 1.1 < found["ddp_bytes_over_bound"]


def compare_connections(tmp_path):
    options = ("--ranks-per-node", "1", "--rate", "800mbit", "--per-connection", "100mbit")
    script = f"{sys.executable} {NETLAB.parent / 'connections.py'} --quick"
    # The link makes it so: four at most, and two of them may share a class. A busy processor may be slower than it.
    ratios = (json.loads(netlab(script, *options).stdout.splitlines()[-1])["several_over_one"]["4"] for _ in range(3))
    assert any(ratio > 1.5 for ratio in ratios)


@needs_namespaces
@pytest.mark.parametrize("compare", [compare_replicas, compare_connections])
def test_two_nodes_are_what_benchmarks_take_them_for(compare, tmp_path):
    compare(tmp_path)


# What crosses the nodes: the sums of gradients, or the pipeline.
@needs_namespaces
@pytest.mark.dear
@pytest.mark.parametrize("placement", ["cluster", "spread"])
def test_the_main_job_on_two_nodes_has_the_weights_of_one_node(placement, tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    layout = ["smp=pp2", f"smp.placement_strategy={placement}", *SMALL_GPT]
    train(folders[0], *layout, "trainer.devices=4", ranks=4)
    arguments = [f"hydra.run.dir={folders[1]}", *layout, "trainer.devices=2", "+trainer.num_nodes=2"]
    done = netlab(shlex.join([sys.executable, str(TRAIN), *arguments]), "--rate", "1gbit", seconds=280.0)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "4 ranks on 2 nodes" in done.stderr  # Lightning logs there
    expected, actual = map(weights, folders)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--speed", "1"], "--speed is no option"),
        (["--rate"], "--rate needs a value"),
        ([], "no command is given"),
        (["--ranks-per-node", "0", "true"], "must be a positive number, but is 0"),
    ],
)
def test_a_mistake_is_named(arguments, said):
    done = subprocess.run([NETLAB, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr


def test_it_says_that_a_tool_is_missing(tmp_path):
    for tool in ("bash", "id"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    environment = {"PATH": str(tmp_path)}
    done = subprocess.run([NETLAB, "true"], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert ("iproute2" if os.geteuid() == 0 else "Run it as root") in done.stderr
