"""Kill a run while it saves, again and again, and look at what is left: ``python -m tests.crash_while_saving``.

A run saves without a pause, in one of four ways: as one file or as a directory of two ranks, while it waits or in the
background. Each save makes a checkpoint of its own, replaces ``last.ckpt``, and deletes an old one. After a random part
of that, SIGKILL ends all of its processes, or one rank, whose peer then fails. Then everything that is announced must
be there, nothing else may be seen under its name, every checkpoint must be undamaged and have exactly the values of its
step, and the next save must remove what is left.

A killed process leaves what it has written to the system, so this is about the order in which things are done; that
they are on the disk is another test: ``tests/unit/checkpoint/storage/test_atomic_commit.py``.
"""

import argparse
import contextlib
import importlib
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from smp_strategy.checkpoint.storage import atomic_commit as commit
from smp_strategy.checkpoint.storage.async_save import BackgroundSave
from smp_strategy.checkpoint.storage.full_file import read_full, write_full
from smp_strategy.checkpoint.storage.held_tensor import HeldRectangle, HeldTensor
from smp_strategy.checkpoint.storage.reader import CheckpointReader
from smp_strategy.checkpoint.storage.verify import problems_of
from smp_strategy.checkpoint.storage.writer import ShardedWriter
from smp_strategy.testing import run_ranks

__all__ = ["crash"]

WORLD_SIZE = 2
KEPT = 2
SHAPES = {"large": (600, 500), "small": (3,), "medium": (64, 100), "number": ()}
WAYS = [(form, in_background) for form in ("full", "sharded") for in_background in (False, True)]


class Outcome(NamedTuple):
    """Of all kills."""

    kills: int
    in_the_middle: int
    """So many left something half-done."""
    put_back: int
    """So many had moved the old checkpoint aside."""
    saves: int
    """So many checkpoints were looked at."""


def values(step: int) -> dict[str, torch.Tensor]:
    """The tensors of a step."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def crash(kills: int, folder: Path, seed: int = 0) -> Outcome:
    """Kill so many runs.

    Raises:
        AssertionError: a checkpoint is missing, damaged, or has other values.
    """
    importlib.import_module("torch._dynamo")  # what ranks need: once here, and not once in every run
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    times: dict[tuple[str, bool], float] = {}
    for number in range(kills):
        form, in_background = way = WAYS[number % len(WAYS)]
        place = folder / f"{form}{'_async' * in_background}"
        place.mkdir(exist_ok=True)
        if way not in times:
            times[way] = duration(place, form, in_background)
        victim = chance.choice(["all", "all", 0, 1]) if form == "sharded" else "all"
        kill_one(place, form, in_background, delay=chance.uniform(0, 2.5 * times[way]), victim=victim)
        try:
            look(place, form, counts)
        except AssertionError as error:
            error.add_note(f"after kill {number} of {victim} ({form}, background: {in_background}), see {place}")
            raise
    return Outcome(kills, counts["in the middle"], counts["put back"], counts["saves"])


# The run


def run(place: Path, form: str, in_background: bool) -> None:
    """Save until somebody ends this process."""
    os.write(_log(place / "pids"), f"{_rank()} {os.getpid()}\n".encode())
    background = BackgroundSave()
    writer = ShardedWriter((lambda: dist.new_group(backend="gloo")) if dist.is_initialized() else None)
    step = newest(place) + 1
    while True:
        for name in (f"step={step}.ckpt", "last.ckpt"):
            write = writing(place / name, form, step, writer, background)
            if in_background:
                background.start(write)
            else:
                write()
        if _rank() == 0:
            background.after(lambda step=step: _announce(place, step))
            background.after(lambda step=step: _delete_old(place, step))
        step += 1


def writing(path: Path, form: str, step: int, writer: ShardedWriter, background: BackgroundSave) -> Callable[[], None]:
    """What writes the checkpoint of a step."""
    tensors = values(step)
    if form == "full":
        return lambda: write_full(path, {"state_dict": tensors, "global_step": step})
    background.wait()  # a save in flight has the writer
    state = {"state_dict": {name: share(tensor) for name, tensor in tensors.items()}}
    prepared = writer.prepare(state)
    for tensor in tensors.values():
        tensor.zero_()
    return lambda: prepared.write(path, rest={"global_step": step}, note={"step": step})


def share(tensor: torch.Tensor) -> HeldTensor:
    """This rank's rows."""
    if not tensor.ndim or not dist.is_initialized():
        return HeldTensor.whole(tensor)
    begin, end = (len(tensor) * rank // dist.get_world_size() for rank in (_rank(), _rank() + 1))
    block = HeldRectangle((begin, *[0] * (tensor.ndim - 1)), tensor[begin:end])
    return HeldTensor(shape=tuple(tensor.shape), dtype=tensor.dtype, blocks=(block,))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _log(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _announce(place: Path, step: int) -> None:
    number = _log(place / "announced")
    os.write(number, f"{step}\n".encode())
    os.close(number)


def _delete_old(place: Path, step: int) -> None:
    for each in steps(place):
        if each <= step - KEPT:
            commit.remove(place / f"step={each}.ckpt")


# The end of a run


def start(place: Path, form: str, in_background: bool) -> int:
    """Begin a run in processes of a group of their own, and wait until its first step is announced."""
    for name in ("pids", "announced"):
        (place / name).unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.dup2(os.open(place / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        try:
            if form == "full":
                run(place, form, in_background)
            else:
                run_ranks(run, WORLD_SIZE, place, form, in_background)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 60
    while not announced(place):
        assert time.monotonic() < deadline, (place / "output").read_text()
        time.sleep(0.001)
    return pid


def kill_one(place: Path, form: str, in_background: bool, *, delay: float, victim: str | int) -> None:
    """A run, until it is killed so many seconds after its first step."""
    pid = start(place, form, in_background)
    time.sleep(delay)
    if victim == "all":
        os.killpg(pid, signal.SIGKILL)
    else:
        pids = dict(line.split() for line in (place / "pids").read_text().splitlines())
        os.kill(int(pids[str(victim)]), signal.SIGKILL)
        deadline = time.monotonic() + 30
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < deadline:
            time.sleep(0.005)  # until the peer has failed
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    _wait_for_group(pid)


def _wait_for_group(pid: int) -> None:
    """Until all processes of a group have gone, whose parent has."""
    deadline = time.monotonic() + 30
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(pid, 0)
            time.sleep(0.001)
            if all(_is_over(each) for each in _members(pid)):
                return


def _members(group: int) -> list[str]:
    found = []
    for each in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if each.isdigit() and os.getpgid(int(each)) == group:
                found.append(each)
    return found


def _is_over(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def duration(place: Path, form: str, in_background: bool) -> float:
    """Seconds from one step to the next."""
    pid = start(place, form, in_background)
    first, begin = announced(place), time.monotonic()
    while announced(place) < first + 5:
        time.sleep(0.001)
    seconds = (time.monotonic() - begin) / 5
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    _wait_for_group(pid)
    return seconds


# What is left


def announced(place: Path) -> int:
    """The last step that is known to be saved."""
    path = place / "announced"
    lines = path.read_text().splitlines() if path.exists() else []
    return int(lines[-1]) if lines else 0


def steps(place: Path) -> list[int]:
    """That can be seen."""
    return sorted(int(match[1]) for each in place.iterdir() if (match := re.fullmatch(r"step=(\d+)\.ckpt", each.name)))


def newest(place: Path) -> int:
    """The last step that can be seen."""
    return max(steps(place), default=0)


def look(place: Path, form: str, counts: Counter[str]) -> None:
    """Compare what is there with what must be."""
    names = {each.name for each in place.iterdir()}
    counts["in the middle"] += any(".saving-" in name or ".deleted-" in name for name in names)
    counts["put back"] += ".last.ckpt.replaced" in names and "last.ckpt" not in names
    last, found = announced(place), steps(place)
    assert last in found, f"step {last} is announced, but there are {found}"
    assert found[-1] <= last + 1, f"{found} are there after step {last}"
    commit.recover_all(place)
    visible = {each.name for each in place.iterdir() if not each.name.startswith(".")}
    assert visible == {f"step={step}.ckpt" for step in found} | {"last.ckpt", "pids", "announced", "output"}
    for step in found:
        check(place / f"step={step}.ckpt", form, {step})
    check(place / "last.ckpt", form, {last, last + 1})
    counts["saves"] += len(found) + 1
    # The next save, by this process alone.
    writing(place / "last.ckpt", form, found[-1], ShardedWriter(), BackgroundSave())()
    check(place / "last.ckpt", form, {found[-1]})
    hidden = [each.name for each in place.iterdir() if each.name.startswith(".")]
    assert not hidden, f"{hidden} are left"


def check(path: Path, form: str, allowed: set[int]) -> None:
    """It must be a step that is allowed, undamaged, bit for bit."""
    problems = problems_of(path)
    assert not problems, f"{path}: {problems}"
    found: dict[str, Any]
    if form == "full":
        content = read_full(path)
        step, found = content["global_step"], content["state_dict"]
    else:
        stored = CheckpointReader.open(path)
        step, found = stored.rest()["global_step"], {name: stored.read(f"state_dict.{name}") for name in SHAPES}
        assert stored.note == {"step": step}
    assert step in allowed, f"{path} is of step {step}, not of {allowed}"
    for name, tensor in values(step).items():
        assert torch.equal(found[name], tensor), f"{path}: {name}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="crash_while_saving-"))
    outcome = crash(options.kills, folder, options.seed)
    shutil.rmtree(folder)
    print(
        f"{outcome.kills} kills, {outcome.in_the_middle} of them in the middle of a save, {outcome.put_back} with the "
        f"old checkpoint moved aside: all of the {outcome.saves} checkpoints that were there are whole and exact."
    )


if __name__ == "__main__":
    main()
