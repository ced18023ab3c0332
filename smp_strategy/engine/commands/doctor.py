"""``smp doctor``: what is installed, which devices and transports there are, what will work here, what to install.

Transports are not looked up but tried: two processes send tensors to each other by each path, as two stages would, so a
path that a container forbids is found before a job is. The examination is plain data, which :func:`render` shows.
"""

import argparse
import contextlib
import multiprocessing
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from smp_strategy.config.config import SMPConfig, option_types
from smp_strategy.config.options import StageTransport
from smp_strategy.config.sizes import show_bytes, show_count
from smp_strategy.config.variables import ENV_PREFIX, note_on_others
from smp_strategy.distributed import device as devices
from smp_strategy.errors import ConfigError, SMPError
from smp_strategy.pipeline.transport.open_channels import HOST, measure_paths, open_channels
from smp_strategy.pipeline.transport.transport import Transport

__all__ = ["Examination", "Tried", "examine", "measured_transports", "render", "run"]

# Distribution: what it is for. The first three are needed, the others are extras and doors.
PACKAGES: Final = {
    "torch": "everything",
    "lightning": 'the door Trainer(strategy="smp")',
    "hydra-core": "the door smp=pp2 on the command line",
    "accelerate": "the door of `accelerate launch` and of Hugging Face's Trainer",
    "transformers": "Hugging Face's models and Trainer",
    "peft": "adapters (LoRA)",
    "jsonargparse": "LightningCLI",
}
NEEDED: Final = 3
_SPELT: Final = {"jsonargparse": "'jsonargparse[signatures]'"}
SECONDS: Final = 120.0
_SMALL: Final = 256 * 2**20
_LINGER: Final = 5.0


class Tried(NamedTuple):
    """A transport between two processes of this machine."""

    name: str
    bytes_per_second: float | None
    """``None``: it does not work."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What was found on this machine."""

    versions: Mapping[str, str | None]
    """Distribution: its version; ``None``: it is not installed."""
    version: str
    """Of this package."""
    python: str
    system: str
    cores: int
    """Cores that this process may use."""
    memory: int
    """Bytes of the machine."""
    shared_memory: int | None
    """Free bytes for blocks between processes; ``None``: there is no ``/dev/shm``."""
    accelerators: Sequence[str]
    no_accelerator: str = ""
    """Reason why there are none."""
    transports: Sequence[Tried] = ()
    compiler: str | None
    is_autoloaded: bool
    """Whether ``import torch`` registers the strategy's name."""
    variables: Sequence[str] = ()
    """Variables of options that are set, and what is wrong with them."""
    unfit: Sequence[str] = ()
    """Installed versions that this package was not made for."""

    @property
    def works(self) -> bool:
        """Whether two ranks can train here."""
        tried = not self.transports or any(each.bytes_per_second for each in self.transports)
        return tried and all(self.versions[name] for name in list(PACKAGES)[:NEEDED])


def run(given: argparse.Namespace) -> int:
    """Print an examination; returns the exit status: 0 if two ranks can train here, else 1."""
    found = examine(with_transports=not given.quick)
    print(render(found))
    return 0 if found.works else 1


def examine(*, with_transports: bool = True) -> Examination:
    """Look at this machine; ``with_transports`` starts two processes, which try the transports."""
    accelerators, reason = _accelerators()
    shm = Path("/dev/shm")
    return Examination(
        versions={name: _version(name) for name in PACKAGES},
        version=import_module("smp_strategy").__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        shared_memory=shutil.disk_usage(shm).free if shm.is_dir() else None,
        accelerators=accelerators,
        no_accelerator=reason,
        transports=_try_transports("cuda" if torch.cuda.is_available() else "cpu") if with_transports else (),
        compiler=next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None),
        is_autoloaded=os.environ.get("SMP_AUTOLOAD") != "0"
        and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0"
        and any(each.name == "smp_strategy" for each in metadata.entry_points(group="torch.backends")),
        variables=_variables(os.environ),
        unfit=_unfit(),
    )


def _version(name: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _unfit() -> list[str]:
    try:
        wanted = [Requirement(text) for text in metadata.requires("smp_strategy") or ()]
    except metadata.PackageNotFoundError:  # a source tree on the path
        return []
    return [
        f"{each.name} {version} is installed, but this package was made for {each.specifier}"
        for each in wanted
        if each.name in PACKAGES and (version := _version(each.name)) and not each.specifier.contains(version, True)
    ]


def _accelerators() -> tuple[list[str], str]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        return [], "no driver or no device is found" if built else "this PyTorch is built for CPUs only"
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        half = "" if torch.cuda.is_bf16_supported() else ", without bfloat16"
        found.append(f"cuda:{index} {about.name}, {show_bytes(about.total_memory)}{half}")
    return found, ""


def _variables(environ: Mapping[str, str]) -> list[str]:
    found = [f"{name}={value}" for name, value in sorted(environ.items()) if name.startswith(ENV_PREFIX)]
    try:
        SMPConfig.from_variables(environ)
    except ConfigError as error:
        found += error.problems
    note = note_on_others(environ, option_types())
    return [*found, note] if note else found


def _try_transports(kind: str) -> list[Tried]:
    """Have two processes try all transports; they are fresh ones, because a fork has no CUDA."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ours, processes = [], []
        for rank in (0, 1):
            end, theirs = context.Pipe()
            processes.append(context.Process(target=_rank_main, args=(rank, folder, kind, theirs), daemon=True))
            processes[-1].start()
            theirs.close()
            ours.append(end)
        try:
            return _answer_of(ours[0], time.monotonic() + SECONDS)
        finally:
            for end, process in zip(ours, processes, strict=True):
                with contextlib.suppress(OSError):
                    end.send_bytes(b"done")
                process.join(_LINGER)
                if process.is_alive():
                    process.kill()


def _answer_of(end: Connection, deadline: float) -> list[Tried]:
    try:
        if end.poll(max(deadline - time.monotonic(), 0.0)):
            found: list[Tried] = end.recv()
            return found
    except EOFError:
        return [Tried("two processes", None, "one of them has ended without an answer; its error is above")]
    return [Tried("two processes", None, f"no answer within {SECONDS:.0f} s")]


def _rank_main(rank: int, folder: str, kind: str, connection: Connection) -> None:
    index = rank % max(torch.cuda.device_count(), 1)
    own_devices = kind == "cuda" and torch.cuda.device_count() > 1
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    backend = "cpu:gloo,cuda:nccl" if own_devices else "gloo"
    device = devices.chosen(torch.device(kind, index))
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    connection.send(measured_transports(device))
    connection.poll(_LINGER)  # the other one may still be receiving
    os._exit(0)  # threads of the transports wait for more


def measured_transports(device: torch.device = HOST) -> list[Tried]:
    """Try each transport between two ranks. Collective over both."""
    assert dist.group.WORLD is not None
    of_host: Sequence[StageTransport] = ("shared_memory", "gloo")
    ways = of_host if devices.is_host(device) else ("cuda_ipc", "nccl", *of_host)
    found = []
    for way in ways:
        try:
            transport = Transport([0, 1], dist.group.WORLD, None, open_channels([0, 1], dist.group.WORLD, way, device))
            [path] = measure_paths(transport, device)
            found.append(Tried(way, path.bytes_per_second))
        except SMPError as error:
            found.append(Tried(way, None, str(error)))
    return found


def render(found: Examination) -> str:
    """The examination as text: what there is, then what works, then what to install."""
    lines = [f"smp_strategy {found.version}, Python {found.python}, {found.system}", "", "Installed"]
    lines += [
        f"  {name:<14}{version or 'not installed':<16}{PACKAGES[name]}" for name, version in found.versions.items()
    ]
    shared = "no /dev/shm" if found.shared_memory is None else f"{show_bytes(found.shared_memory)} free in /dev/shm"
    lines += ["", "Devices"]
    lines += [f"  CPU: {show_count(found.cores, 'core')}, {show_bytes(found.memory)} of memory, {shared}"]
    lines += [f"  {each}" for each in found.accelerators] or [f"  no accelerator: {found.no_accelerator}"]
    if found.transports:
        lines += ["", "Transports between two processes of this machine (tensors of 4 MiB)"]
        lines += [
            f"  {name:<16}" + (f"{rate / 1e9:.1f} GB/s" if rate else f"does not work: {reason}")
            for name, rate, reason in found.transports
        ]
    if found.variables:
        lines += ["", "Environment", *(f"  {each}" for each in found.variables)]
    lines += ["", "What works here", *(f"  {each}" for each in _working(found))]
    if wanted := _to_install(found):
        lines += ["", "What to install or change", *(f"  {each}" for each in wanted)]
    return "\n".join(lines)


def _working(found: Examination) -> list[str]:
    if not found.works:
        return ["no training on two ranks: see below"]
    many = len(found.accelerators)
    where = f"devices={many}" if many > 1 else f'accelerator="cpu", devices={max(2, min(found.cores, 8))}'
    lines = [f'Trainer(strategy="smp", {where}), or a layout by name: strategy="smp_pp2", "smp_sdp2", "smp_tp2"']
    if many == 1:
        lines.append("one accelerator: a single rank trains on it; try layouts of several ranks on CPUs as above")
    if found.versions["accelerate"]:
        lines.append("accelerate launch with a section `smp_config: pp2` in its file; Hugging Face's Trainer likewise")
    if found.compiler:
        lines.append("compile=True")
    lines.append("smp export, import, inspect, verify and explain, without ranks")
    return lines


def _to_install(found: Examination) -> list[str]:
    lines = [*found.unfit]
    lines += [
        f"pip install {_SPELT.get(name, name)}: {use}" + ("" if index < NEEDED else " (only if you want it)")
        for index, (name, use) in enumerate(PACKAGES.items())
        if found.versions[name] is None
    ]
    if not found.is_autoloaded:
        lines.append(
            'the name strategy="smp" needs `import smp_strategy` in the script: the package is not installed with its '
            "entry point, or SMP_AUTOLOAD=0 or TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set"
        )
    if found.shared_memory is None or found.shared_memory < _SMALL:
        lines.append("more shared memory, or stages exchange tensors by sockets: in a container --shm-size=8g")
    if not found.compiler:
        lines.append("a C++ compiler, for compile=True (only if you want it)")
    if not found.works and found.transports:
        lines.append(
            "two processes cannot talk: is a firewall or a container in the way? GLOO_SOCKET_IFNAME=lo may help"
        )
    return lines
