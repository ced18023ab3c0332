"""Memory that a microbatch's thread has freed is there for the next one."""

import os
import platform
import subprocess
import sys

import pytest

# A thread makes blocks which the main thread frees, as backward does; prints the page faults of later rounds. PyTorch
# would take its blocks from the same malloc, and seconds to import.
ROUNDS = """
import ctypes, resource, sys, threading
from smp_strategy.distributed.malloc import keep_freed_memory

# Where glibc starts: each large block that is freed raises it, in builds of torch for CUDA while they are imported.
MMAP_THRESHOLD = -3
ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 128 * 1024)
if sys.argv[1] == "keep":
    keep_freed_memory()
held = []
def microbatch():
    for _ in range(4):
        go.acquire()
        held.extend(bytearray(1024 * 1024) for _ in range(100))
        done.release()
go, done = threading.Semaphore(0), threading.Semaphore(0)
threading.Thread(target=microbatch, daemon=True).start()
for number in range(4):
    if number == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    go.release()
    done.acquire()
    held.clear()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str, **environment: str) -> int:
    command = [sys.executable, "-c", ROUNDS, mode]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no thresholds")
def test_freed_memory_is_used_again_unless_the_user_has_chosen_otherwise():
    kept = page_faults("keep")
    assert page_faults("leave") > 4 * kept
    assert page_faults("keep", MALLOC_TRIM_THRESHOLD_="131072") > 4 * kept
