"""What is printed, and after how many seconds, when something goes wrong in one process of several?

Each fault is injected into a small run that real processes train, started as users start them: by Lightning's own
launcher, ``torchrun`` or ``accelerate launch``. What all processes print is caught together and counted, without what
torchrun and Accelerate print of themselves at the end. The first line that is about the failure must name the cause;
in a traceback that is the line of the exception. If no process could print one, the launcher's table must name it.

    python benchmarks/faults.py                          all faults, doors and layouts; about an hour on two cores
    python benchmarks/faults.py kill-1 raise-all --door lightning --layout pp2 --layout tp2
    python benchmarks/faults.py kill-1 --door torchrun --layout sdp2 --show

With ``--random`` rank, moment, launcher and layout are drawn, from the start of the interpreter on. Such a run saves
while it trains, half of the time in the background. It must end with the cause within ``BOUND_SECONDS`` (30 s more
where torchrun waits for a stopped process), or train to the bits of the undisturbed run; a table says which of the two
it did, by fault, launcher and layout. Full disks and links between two nodes are made of mounts and network namespaces,
for which one must be root::

    python benchmarks/faults.py --random 200 --seed 1        # about two hours on two cores
    python benchmarks/faults.py --random 1 --seed 7 raise-any --show

The last line is JSON: how many runs there were, how many of them have ended as they should, and the most lines and
seconds.
"""

import argparse
import contextlib
import ctypes
import json
import math
import mmap
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__)
STEP = 3
LIMIT_SECONDS = 300
BOUND_SECONDS = 90
# torchrun waits so long for a process that it has told to end, and a stopped one does not.
STOPPED_SECONDS = 30
LATE = "it ends late"
MOST_LINES = 60
DOORS = ("lightning", "torchrun", "accelerate")
LAYOUTS = {
    "pp2": {"SMP_PIPELINE_PARALLEL_DEGREE": "2", "SMP_MICROBATCHES": "2"},
    "sdp2": {"SMP_SHARDED_DATA_PARALLEL_DEGREE": "2"},
    "tp2": {"SMP_TENSOR_PARALLEL_DEGREE": "2"},
    "pp4": {"SMP_PIPELINE_PARALLEL_DEGREE": "4", "SMP_MICROBATCHES": "4"},
    "pp2_sdp2": {"SMP_PIPELINE_PARALLEL_DEGREE": "2", "SMP_SHARDED_DATA_PARALLEL_DEGREE": "2", "SMP_MICROBATCHES": "2"},
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, and the words that the output must have."""

    kind: str
    rank: int | None = 1
    """``None``: all ranks."""
    place: str = "step"
    said: str
    """A pattern of the first line about the failure."""
    codes: tuple[int, ...] = ()
    """Exit codes of the first process that are right, by Lightning's launcher; none: any but 0."""
    layouts: tuple[str, ...] = ()
    """Under which it is a fault; none: under all."""
    seconds: float = 0.0
    """From the place to the fault."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One run of ``--random``."""

    name: str
    fault: Fault
    door: str
    layout: str
    in_background: bool
    """Whether its saves are asynchronous."""


KILLED = r"was killed by SIGKILL \(signal 9\)"
MISTAKE = "ValueError: a mistake of the user"
FAULTS = {
    "kill-1": Fault(kind="kill", said=rf"rank 1 .*{KILLED}"),
    "kill-0": Fault(kind="kill", rank=0, said=r"[Rr]ank 0\b"),
    "kill-1-any-time": Fault(kind="kill-later", said=rf"rank 1 .*{KILLED}"),
    "kill-1-in-validation": Fault(kind="kill", place="validation", said=rf"rank 1 .*{KILLED}"),
    "kill-1-while-saving": Fault(kind="kill", place="save", said=rf"rank 1 .*{KILLED}"),
    "raise-1": Fault(kind="raise", said=MISTAKE),
    "raise-0": Fault(kind="raise", rank=0, said=MISTAKE),
    "raise-all": Fault(kind="raise", rank=None, said=MISTAKE),
    "raise-1-in-validation": Fault(kind="raise", place="validation", said=MISTAKE),
    "raise-1-in-a-loader's-worker": Fault(kind="raise", place="worker", said=MISTAKE),
    "memory-1": Fault(kind="memory", said="MemoryError"),
    "exit-1": Fault(kind="exit", said="rank 1"),
    "crash-1": Fault(kind="crash", said=r"rank 1 .*SIGSEGV"),
    "cut-file-1": Fault(kind="cut-file", said=r"rank 1 .*SIGBUS \(signal 7\), as the system does when a file is"),
    "sigterm-0": Fault(kind="sigterm", rank=0, said="SIGTERM", codes=(143,)),
    "sigterm-1": Fault(kind="sigterm", said="SIGTERM", codes=(143,)),
    "sigterm-group": Fault(kind="sigterm-group", rank=0, said="SIGTERM", codes=(143,)),
    "stop-1": Fault(kind="stop", said="Rank 1 has given no sign of life"),
    "reads-1": Fault(
        kind="part",
        place="read",
        said="wait for each other for ever|did not run the same code|different calls",
        layouts=("pp2", "tp2", "pp4", "pp2_sdp2"),
    ),
    "should-stop-1": Fault(kind="part", place="stop", said="wait for each other for ever|different calls"),
    "ctrl-c": Fault(kind="ctrl-c", rank=0, said="KeyboardInterrupt", codes=(1,)),
}
# Faults at any time, on any rank (R), with the first line about them; a delayed rank goes on.
DISK_FULL = r"disk is full|No space left on device"
ANY_TIME = {
    "kill": r"[Rr]ank R (is gone|.*was killed by SIGKILL)",
    "crash": r"[Rr]ank R (is gone|.*was killed by SIGSEGV)",
    "stop": r"Rank R (\(process \d+\) has been stopped|has given no sign of life)|Missing: ranks? [\d, ]*R\b",
    "delay": "no words: it goes on",
    "raise-any": "a mistake of the user",
    "sigterm": "SIGTERM",
    "full-disk": DISK_FULL,
    "full-shm": rf"{DISK_FULL}|[Rr]ank R (is gone|.*was killed by SIGBUS)",
    "drop-link": r"no sign of life|has not answered|is gone|timed out",
}
# With which signal a fault ends a process; the table of torchrun names it.
SIGNALS = {
    "kill": "SIGKILL",
    "kill-later": "SIGKILL",
    "crash": "SIGSEGV",
    "cut-file": "SIGBUS",
    "full-shm": "SIGBUS",
    "sigterm": "SIGTERM",
    "sigterm-group": "SIGTERM",
}
# Lines that every run prints: the report of the first step, those of Lightning and launchers, those of rank 0 while
# others begin late.
REPORT = re.compile(r"^Process mesh: .*?^More: `smp_report=.*?$", re.DOTALL | re.MULTILINE)
CHATTER = re.compile(
    r"(GPU|TPU|HPU) available|\S+ Tip: |Initializing distributed|distributed_backend=|All distributed processes|-+$|"
    r"`Trainer\.fit` stopped|netlab: |\[?\w\d{4} .*(torch/distributed/elastic|socket.cpp)|"
    r"Rank 0 has waited \d+ s for all"
)


def drawn(chance: random.Random, names: Sequence[str]) -> Draw:
    """A run with a fault at a random moment."""
    name = chance.choice(list(names))
    door = "nodes" if name == "drop-link" else chance.choice(["lightning", "lightning", "torchrun", "accelerate"])
    layout = "pp2" if door == "nodes" else chance.choice(["pp2", "sdp2", "tp2", "pp2_sdp2"])
    rank = chance.randrange(ranks_of(layout))
    if name == "stop" and rank == 0:  # a launcher that is stopped never ends
        door = chance.choice(["torchrun", "accelerate"])
    place, most = chance.choice([("begin", 6.0), ("step", 1.5), ("step", 1.5)])
    # Before the run only Lightning's launcher, rank 0, sees other ranks; else they are waited for until `timeout`.
    if name in ("stop", "drop-link") and (rank == 0 or door != "lightning"):
        place, most = "step", 1.5
    fault = Fault(
        kind=name,
        rank=rank,
        place=place,
        said=re.sub(r"\bR\b", str(rank), ANY_TIME[name]),
        seconds=round(chance.uniform(0, most), 3),
    )
    return Draw(name=name, fault=fault, door=door, layout=layout, in_background=chance.random() < 0.5)


# --- in each of the processes that train ------------------------------------------------------------------------------


def strike(place: str, number: int) -> bool:
    """Let the fault happen if this is where and when; whether it is, for faults that the caller lets happen."""
    kind, rank, where, seconds = json.loads(os.environ["FAULT"])
    this = int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)
    if place != where or number != STEP or rank not in (None, this):
        return False
    if seconds:
        os.environ["FAULT"] = json.dumps([kind, -1, where, 0.0])  # once, though every microbatch comes here
        timer = threading.Timer(seconds, harm, [kind])
        timer.daemon = True
        timer.start()
        return True
    return harm(kind)


class AnyMistake(Exception):
    """A mistake of the user, wherever the program is."""

    def __str__(self) -> str:
        return "a mistake of the user"


def harm(kind: str) -> bool:
    """Let the fault happen; whether it is one that the caller lets happen."""
    Path(os.environ["STRUCK"]).touch()
    if kind == "raise":
        raise ValueError("a mistake of the user")
    if kind == "memory":
        raise MemoryError
    if kind == "exit":
        sys.exit(3)
    if kind == "cut-file":
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            mapped = mmap.mmap(file.fileno(), 0)
            file.truncate(0)
            mapped[0]
    if kind == "kill-later":
        threading.Timer(time.time() % 0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if kind == "delay":
        subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {os.getpid()}"], start_new_session=True)
    if kind == "raise-any":
        main = ctypes.c_ulong(threading.main_thread().ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(AnyMistake))
    if kind in ("full-disk", "full-shm"):
        fill(Path("disk" if kind == "full-disk" else "/dev/shm"))
    if kind == "drop-link":
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    stops = dict.fromkeys(("stop", "delay"), signal.SIGSTOP)
    numbers = {"kill": signal.SIGKILL, "crash": signal.SIGSEGV, "sigterm": signal.SIGTERM, **stops}
    if kind in numbers:
        os.kill(os.getpid(), numbers[kind])
    if kind in ("sigterm-group", "ctrl-c"):
        os.killpg(0, signal.SIGINT if kind == "ctrl-c" else signal.SIGTERM)
    return True


def fill(folder: Path) -> None:
    """Leave no room in a folder."""
    with contextlib.suppress(OSError), (folder / "large").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def parts() -> tuple[Any, Any]:
    """A model of blocks, and samples."""
    import torch
    from torch import nn

    class Samples(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4096

        def __getitem__(self, index: int) -> torch.Tensor:
            if torch.utils.data.get_worker_info() is not None:
                strike("worker", index // 8)
            return torch.full((16,), index / 4096)

    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(6)))
    return net, torch.utils.data.DataLoader(Samples(), batch_size=8, num_workers='"worker"' in os.environ["FAULT"])


def train_with_lightning(folder: str) -> None:
    """A script for Lightning, as users write it."""
    import lightning as L
    import torch

    net, loader = parts()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(0.01)
            strike("step", batch_idx)
            loss = (self.net(batch) - batch).square().mean()
            if strike("read", batch_idx):
                loss.item()
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if strike("stop", batch_idx):
                self.trainer.should_stop = True

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            strike("validation", batch_idx)
            return self.net(batch).square().mean()

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            strike("save", self.global_step)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    saves, steps = '"save"' in os.environ["FAULT"], int(os.environ.get("STEPS", "-1"))
    saving = L.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    if steps > 0:
        saves, saving = (
            True,
            L.pytorch.callbacks.ModelCheckpoint("disk", every_n_train_steps=5, save_top_k=1),
        )
    nodes = 2 if os.environ.get("TORCHELASTIC_RUN_ID") == "netlab" else 1
    trainer = L.Trainer(
        strategy="smp",
        accelerator="cpu",
        devices=int(os.environ["DEVICES"]) // nodes,
        num_nodes=nodes,
        max_epochs=1,
        max_steps=steps,
        val_check_interval=5,
        limit_val_batches=10,
        num_sanity_val_steps=0,
        callbacks=[saving] if saves else [],
        enable_checkpointing=saves,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader, loader)
    if steps > 0:
        trainer.save_checkpoint(f"{folder}/weights.ckpt")


def train_with_accelerate(folder: str) -> None:
    """A script for Accelerate, as users write it."""
    import accelerate
    import torch

    net, loader = parts()
    steps = int(os.environ.get("STEPS", "-1"))
    accelerator = accelerate.Accelerator(cpu=True)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.Adam(net.parameters()), loader)
    for number, batch in enumerate(loader):
        time.sleep(0.01)
        strike("step", number)
        loss = (net(batch) - batch).square().mean()
        if strike("read", number):
            loss.item()
        if strike("stop", number):
            return
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if number == STEP or (steps > 0 and number % 5 == 0):
            with torch.no_grad():
                strike("validation", number)
                net(batch)
            accelerator.save_state("disk" if steps > 0 else folder)
        if number + 1 == steps:
            weights = accelerator.get_state_dict(net)
            if accelerator.is_main_process:
                torch.save({"state_dict": weights}, f"{folder}/weights.ckpt")
            return


# --- outside ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The end of a run."""

    seconds: float
    """From the fault to the end of the last process."""
    code: int | None
    """Of the first process; ``None``: it had to be ended."""
    told: str
    weights: Mapping[str, Any] = field(default_factory=dict)
    """Of a run that has trained to its end."""

    @property
    def lines(self) -> list[str]:
        """Lines of the processes that train."""
        lines = [line for line in self.told.splitlines() if "torch/distributed/elastic" not in line[:120]]
        ends = [number for number, line in enumerate(lines) if "<frozen runpy>" in line]
        return lines[: ends[0] - 1] if ends else lines

    @property
    def first_line(self) -> str:
        """The first line about the failure, of a traceback that with the exception; empty: the ranks have no words."""
        for line in REPORT.sub("", "\n".join(self.lines)).splitlines():
            text = re.sub(r"^(\[rank\d+\]: )?", "", line)
            if text.strip() and not text.startswith((" ", "Traceback (most")) and not CHATTER.match(text):
                return line
        return ""

    def names(self, fault: Fault) -> bool:
        """Whether the first line about the failure names its cause, or the launcher's table if it must."""
        first = self.first_line
        if first and "names the signal" not in first:
            return bool(re.search(fault.said, first))
        rank = r"\d" if fault.rank is None else fault.rank
        table = rf"Root Cause.*?rank +: {rank} .*?\({SIGNALS.get(fault.kind, 'none')}\)"
        return bool(re.search(table, self.told, re.DOTALL))

    def problems(self, fault: Fault, door: str) -> list[str]:
        """Differences from what is promised, in words."""
        lines, is_ours = self.lines, door == "lightning"
        wrong = {
            "it hangs": self.code is None,
            "it ended before the fault": math.isnan(self.seconds),
            f"exit code {self.code}": self.code == 0 or (is_ours and fault.codes and self.code not in fault.codes),
            # Until the package is imported nothing shortens a traceback.
            "too many lines": len(lines) > MOST_LINES and fault.place != "begin",
            "the first line does not name the cause": not self.names(fault),
            "more than one traceback": sum("Traceback (most" in line and "Original" not in line for line in lines) > 1,
        }
        return [what for what, is_so in wrong.items() if is_so]


def ranks_of(layout: str) -> int:
    """Ranks of a layout."""
    return 4 if "4" in layout or "_" in layout else 2


def command_of(door: str, ranks: int, folder: str) -> list[str]:
    """How a user starts the run."""
    script = [str(HERE), "--train", folder, door]
    if door == "nodes":
        netlab = [str(HERE.with_name("netlab.sh")), "--ranks-per-node", "1", "--rate", "1gbit"]
        return [*netlab, sys.executable, *script]
    if door == "lightning":
        return [sys.executable, *script]
    if door == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone", *script]
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", f"--num_processes={ranks}"]
    return [
        *accelerate,
        "--num_machines=1",
        "--mixed_precision=no",
        "--dynamo_backend=no",
        "--main_process_port=0",
        *script,
    ]


def run(fault: Fault, door: str, layout: str, **more: str) -> Seen:
    """Train until the fault has ended it; with ``more`` variables."""
    ranks = ranks_of(layout)
    variables = {
        "FAULT": json.dumps([fault.kind, fault.rank, fault.place, fault.seconds]),
        "DEVICES": str(ranks),
        "STRUCK": "struck",
        "ACCELERATE_USE_SMP": "true",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(HERE.parents[1]),
        "OMP_NUM_THREADS": "1",
        **LAYOUTS[layout],
        **more,
    }
    with tempfile.TemporaryDirectory() as folder:
        command = command_of(door, ranks, folder)
        Path(folder, "disk").mkdir()
        if fault.kind in SMALL_DISKS:
            mount = f'mount -t tmpfs -o size={SMALL_DISKS[fault.kind]} tmpfs {PLACES[fault.kind]} && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", mount, "sh", *command]
        process = subprocess.Popen(
            command,
            env={**os.environ, **variables},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            told, _ = process.communicate(timeout=LIMIT_SECONDS)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            told, _ = process.communicate()
            code = None
        struck = Path(folder, "struck")
        seconds = time.time() - struck.stat().st_mtime if struck.exists() else float("nan")
        return Seen(seconds=seconds, code=code, told=told, weights=weights_in(Path(folder, "weights.ckpt")))


# Folders that are made small enough to be filled.
SMALL_DISKS = {"full-disk": "16m", "full-shm": "256m"}
PLACES = {"full-disk": "disk", "full-shm": "/dev/shm"}


def weights_in(path: Path) -> Mapping[str, Any]:
    """Weights of a checkpoint; none if it is not there."""
    import torch

    return dict(torch.load(path, weights_only=True)["state_dict"]) if path.is_file() else {}


class AtRandom:
    """Runs with faults at random moments."""

    def __init__(self, seed: int, names: Sequence[str] = ()) -> None:
        self._chance, self._names = random.Random(seed), names or list(ANY_TIME)
        self._undisturbed: dict[tuple[str, str], Mapping[str, Any]] = {}
        self.ends: dict[str, Counter[str]] = defaultdict(Counter)
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def once(self) -> tuple[Draw, Seen, list[str]]:
        """A run, and what is wrong with its end."""
        draw = drawn(self._chance, self._names)
        seen = run(draw.fault, draw.door, draw.layout, **self._variables(draw.in_background))
        problems = self._problems(draw, seen)
        end = "wrong" if problems else "recovered" if seen.code == 0 else "told"
        for label in (draw.name, draw.door, draw.layout, "all"):
            self.ends[label][end] += 1
            self.ends[label]["in bound"] += seen.code is not None and LATE not in problems
            if seen.code != 0:
                self.seconds[label].append(seen.seconds)
        return draw, seen, problems

    def _problems(self, draw: Draw, seen: Seen) -> list[str]:
        if seen.code == 0:
            expected = self._reference(draw)
            same = seen.weights.keys() == expected.keys() and all(
                expected[name].equal(weight) for name, weight in seen.weights.items()
            )
            return [] if same else ["it has other weights"]
        waits = STOPPED_SECONDS if draw.name == "stop" and draw.door in ("torchrun", "accelerate") else 0
        slow = [LATE] if seen.seconds > BOUND_SECONDS + waits else []
        # Nobody is there to tell of a launcher that ends before it has imported the package.
        is_lost = draw.fault.rank == 0 and draw.fault.place == "begin" and draw.name in ("kill", "crash", "sigterm")
        return slow if is_lost else slow + seen.problems(draw.fault, draw.door)

    def _reference(self, draw: Draw) -> Mapping[str, Any]:
        if (draw.door, draw.layout) not in self._undisturbed:
            nothing = Fault(kind="nothing", place="never", said="")
            seen = run(nothing, draw.door, draw.layout, **self._variables(False))
            assert seen.code == 0, seen.told
            self._undisturbed[draw.door, draw.layout] = seen.weights
        return self._undisturbed[draw.door, draw.layout]

    @staticmethod
    def _variables(in_background: bool) -> dict[str, str]:
        return {"STEPS": "150", "SMP_ASYNC_SAVE": str(in_background).lower()}

    def table(self) -> str:
        """Counts of endings, by fault, launcher and layout."""
        lines = [
            "| | runs | in time | told the cause | trained to the same bits | wrong | most seconds |",
            "|---|---|---|---|---|---|---|",
        ]
        for label in (name for name in (*ANY_TIME, *DOORS, "nodes", *LAYOUTS, "all") if name in self.ends):
            told, recovered, wrong = (self.ends[label][end] for end in ("told", "recovered", "wrong"))
            most = f"{max(self.seconds[label]):.1f}" if self.seconds[label] else ""
            cells = (label, told + recovered + wrong, self.ends[label]["in bound"], told, recovered, wrong, most)
            lines.append(f"| {' | '.join(map(str, cells))} |")
        return "\n".join(lines)


def main() -> None:
    """Inject, count, and say it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=", ".join([*FAULTS, *ANY_TIME]))
    parser.add_argument("--door", action="append", choices=DOORS)
    parser.add_argument("--layout", action="append", choices=list(LAYOUTS))
    parser.add_argument("--show", action="store_true", help="what is printed")
    parser.add_argument("--random", type=int, metavar="RUNS", help="so many runs with faults at random moments")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.train:
        folder, door = chosen.train
        strike("begin", STEP)
        (train_with_accelerate if door == "accelerate" else train_with_lightning)(folder)
        return
    runs, lines, seconds = [], [0], [0.0]
    if chosen.random:
        at_random = AtRandom(chosen.seed, chosen.faults)
        for number in range(chosen.random):
            draw, seen, problems = at_random.once()
            where = f"rank {draw.fault.rank}, {draw.fault.seconds} s after {draw.fault.place}"
            how = f"{draw.door} {draw.layout}{' async' * draw.in_background}"
            end = f"{seen.seconds:.1f} s, exit code {seen.code}, {len(seen.lines)} lines"
            print(f"{number:3} {draw.name:10} {where:32} {how:24} {end}  {', '.join(problems)}", flush=True)
            if chosen.show or problems:
                print(seen.told, flush=True)
            runs.append(not problems)
            lines.append(len(seen.lines))
            seconds += [seen.seconds] if seen.code != 0 else []
        print(at_random.table())
    for name in () if chosen.random else chosen.faults or FAULTS:
        for door in chosen.door or DOORS:
            for layout in chosen.layout or LAYOUTS:
                if layout not in (FAULTS[name].layouts or LAYOUTS):
                    continue
                seen = run(FAULTS[name], door, layout)
                problems = seen.problems(FAULTS[name], door)
                what = f"{name:28} {door:10} {layout:9} {seen.seconds:5.1f} s  exit code {seen.code}"
                print(f"{what}  {len(seen.lines):3} lines  {', '.join(problems)}", flush=True)
                if chosen.show:
                    print(seen.told)
                runs.append(not problems)
                lines.append(len(seen.lines))
                seconds.append(seen.seconds)
    print(json.dumps({"runs": len(runs), "right": sum(runs), "lines": max(lines), "seconds": round(max(seconds), 1)}))


if __name__ == "__main__":
    main()
