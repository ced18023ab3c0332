"""What is printed, and after how many seconds, when something goes wrong in one process of several?

Each fault is injected into a small run that real processes train, started as users start them: by Lightning's own
launcher, ``torchrun`` or ``accelerate launch``. What all processes print is caught together and counted, without what
torchrun and Accelerate print of themselves at the end; the cause must stand in it.

    python benchmarks/faults.py                          all faults, doors and layouts; about an hour on two cores
    python benchmarks/faults.py kill-1 raise-all --door lightning --layout pp2 --layout tp2
    python benchmarks/faults.py kill-1 --door torchrun --layout sdp2 --show

The last line is JSON: how many runs there were, how many of them have ended as they should, and the most lines and
seconds.
"""

import argparse
import json
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__)
STEP = 3
LIMIT_SECONDS = 180
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
    """A pattern that what is printed must have; where another launcher starts the ranks, it says what killed them."""
    codes: tuple[int, ...] = ()
    """Exit codes of the first process that are right, by Lightning's launcher; none: any but 0."""
    layouts: tuple[str, ...] = ()
    """Under which it is a fault; none: under all."""


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


# --- in each of the processes that train ------------------------------------------------------------------------------


def strike(place: str, number: int) -> bool:
    """Let the fault happen if this is where and when; whether it is, for faults that the caller lets happen."""
    kind, rank, where = json.loads(os.environ["FAULT"])
    if place != where or number != STEP or rank not in (None, int(os.environ.get("LOCAL_RANK", "0"))):
        return False
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
    numbers = {"kill": signal.SIGKILL, "crash": signal.SIGSEGV, "sigterm": signal.SIGTERM, "stop": signal.SIGSTOP}
    if kind in numbers:
        os.kill(os.getpid(), numbers[kind])
    if kind in ("sigterm-group", "ctrl-c"):
        os.killpg(0, signal.SIGINT if kind == "ctrl-c" else signal.SIGTERM)
    return True


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
    net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)))
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

    saving = L.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    L.Trainer(
        strategy="smp",
        accelerator="cpu",
        devices=int(os.environ["DEVICES"]),
        max_epochs=1,
        val_check_interval=5,
        limit_val_batches=10,
        num_sanity_val_steps=0,
        callbacks=[saving] if '"save"' in os.environ["FAULT"] else [],
        enable_checkpointing='"save"' in os.environ["FAULT"],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), loader, loader)


def train_with_accelerate(folder: str) -> None:
    """A script for Accelerate, as users write it."""
    import accelerate
    import torch

    net, loader = parts()
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
        if number == STEP:
            with torch.no_grad():
                strike("validation", number)
                net(batch)
            accelerator.save_state(folder)


# --- outside ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The end of a run."""

    seconds: float
    """From the fault to the end of the last process."""
    code: int | None
    """Of the first process; ``None``: it had to be ended."""
    told: str

    @property
    def lines(self) -> list[str]:
        """Lines of the processes that train."""
        lines = [line for line in self.told.splitlines() if "torch/distributed/elastic" not in line[:120]]
        ends = [number for number, line in enumerate(lines) if "<frozen runpy>" in line]
        return lines[: ends[0] - 1] if ends else lines

    def problems(self, fault: Fault, door: str) -> list[str]:
        """Differences from what is promised, in words."""
        lines, is_ours = self.lines, door == "lightning"
        said = fault.said if is_ours or fault.kind in ("raise", "memory") else "SIG|exitcode|KeyboardInterrupt"
        wrong = {
            "it hangs": self.code is None,
            f"exit code {self.code}": self.code == 0 or (is_ours and fault.codes and self.code not in fault.codes),
            "too many lines": len(lines) > MOST_LINES,
            "the cause is not told": not re.search(said, "\n".join(lines) if is_ours else self.told),
            "more than one traceback": sum("Traceback (most" in line and "Original" not in line for line in lines) > 1,
        }
        return [what for what, is_so in wrong.items() if is_so]


def command_of(door: str, ranks: int, folder: str) -> list[str]:
    """How a user starts the run."""
    script = [str(HERE), "--train", folder, door]
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


def run(fault: Fault, door: str, layout: str) -> Seen:
    """Train until the fault has ended it."""
    ranks = 4 if "4" in layout or "_" in layout else 2
    variables = {
        "FAULT": json.dumps([fault.kind, fault.rank, fault.place]),
        "DEVICES": str(ranks),
        "STRUCK": "struck",
        "ACCELERATE_USE_SMP": "true",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(HERE.parents[1]),
        "OMP_NUM_THREADS": "1",
        **LAYOUTS[layout],
    }
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command_of(door, ranks, folder),
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
        return Seen(seconds=seconds, code=code, told=told)


def main() -> None:
    """Inject, count, and say it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--door", action="append", choices=DOORS)
    parser.add_argument("--layout", action="append", choices=list(LAYOUTS))
    parser.add_argument("--show", action="store_true", help="what is printed")
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.train:
        folder, door = chosen.train
        (train_with_accelerate if door == "accelerate" else train_with_lightning)(folder)
        return
    runs, lines, seconds = [], [0], [0.0]
    for name in chosen.faults or FAULTS:
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
