"""Simulated accelerator: the device type ``simulated``, in host memory, whose streams lag behind.

Work that is queued on a stream is done when somebody waits for it, and no earlier, or on a random schedule
(:func:`lag`); memory that nobody has written to is not a number. So a missing wait between streams gives wrong values
without a GPU. There are four devices, with operators of the CPU, and two backends for process groups: ``simulated``,
with a stream of its own, as NCCL has, and ``like_gloo``, for ranks that share a device.

The extension (``csrc``) is compiled once, by the compiler of torch's extensions, and kept in ``build/simulated`` of
the repository. A process that loads it has an accelerator from then on, so only ranks of their own should,
and none whose parent has run autograd (:func:`run_clean`).

* ``queues.h``: the streams' work, and when it is done.
* ``device.h``: devices, streams, events, memory and generators, as torch asks for them.
* ``accelerator.cpp``: operators and copies.
* ``collectives.cpp``: the backend for process groups.
"""

import hashlib
import importlib.util
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock

__all__ = ["build", "join", "lag", "load", "run_clean"]

SOURCES = Path(__file__).parent / "csrc"
BUILT = Path(__file__).parents[2] / "build" / "simulated"
NAME = "simulated"


def build() -> Path:
    """Compile the extension, unless it is there; the test is skipped where there is no compiler."""
    from torch.utils.cpp_extension import include_paths, library_paths

    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("the simulated accelerator needs a compiler for C++ (g++, or that of CXX)")
    sources = sorted(SOURCES.iterdir())
    key = hashlib.sha256("".join([torch.__version__, sys.version, *map(Path.read_text, sources)]).encode())
    found = BUILT / f"{key.hexdigest()[:16]}.so"
    if found.exists():
        return found
    BUILT.mkdir(parents=True, exist_ok=True)
    # Workers of pytest want it at the same time.
    with FileLock(f"{found}.lock"):
        if not found.exists():
            folders = [*include_paths(), sysconfig.get_path("include")]
            flags = ["-std=c++20", "-O1", "-fPIC", f"-DTORCH_EXTENSION_NAME={NAME}", *(f"-I{each}" for each in folders)]
            # One translation unit: PyTorch's headers are most of the work.
            files = ["-include", SOURCES / "accelerator.cpp", SOURCES / "collectives.cpp"]
            libraries = [f"-L{each}" for each in library_paths()]
            needed = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
            made = found.with_suffix(".tmp")
            subprocess.run([compiler, *flags, "-shared", *files, *libraries, *needed, "-o", made], check=True)
            made.replace(found)
    return found


def run_clean(run: Callable[..., Any], *args: Any) -> Any:
    """Call ``run(*args)``, which forks ranks, in a process in which no backward has run.

    Autograd has threads for the devices that exist at the first backward of a process, and forked ranks inherit the
    decision. The tests' own process has run others before.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "smp_strategy.engine.engine"])
    with ProcessPoolExecutor(1, context, torch.set_num_threads, (1,)) as pool:
        return pickle.loads(pool.submit(_pickled, run, *args).result())


def _pickled(run: Callable[..., Any], *args: Any) -> bytes:
    # Not multiprocessing's own way for tensors, which passes handles.
    return pickle.dumps(run(*args))


def load(library: Path) -> None:
    """Give this process the accelerator, from :func:`build`; once."""
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module())
    torch.utils.generate_methods_for_privateuse1_backend()

    def register(backend: str, name: str) -> None:
        def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
            return extension.backend(store, rank, size, name)

        dist.Backend.register_backend(backend, make, devices=[NAME])

    register("like_gloo", "gloo")
    register(NAME, NAME)  # the last one is the default for the device


def lag(seed: int = 0) -> None:
    """Choose when work is done: 0: when somebody waits for it; another number: some of it earlier, at random."""
    torch.ops.simulated.seed(seed)


def _device_module() -> ModuleType:
    ops, count = torch.ops.simulated, torch.ops.simulated.device_count()
    generators = tuple(ops.default_generator(index) for index in range(count))
    module = ModuleType(f"torch.{NAME}")
    module.__dict__.update(
        init=lambda: None,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: count,
        current_device=ops.current_device,
        set_device=lambda device: ops.set_device(torch.device(NAME, device).index),
        synchronize=torch.accelerator.synchronize,
        default_generators=generators,
        manual_seed_all=lambda seed: [each.manual_seed(seed) for each in generators],
        get_rng_state_all=lambda: [each.get_state() for each in generators],
        set_rng_state_all=lambda states: [each.set_state(s) for each, s in zip(generators, states, strict=True)],
        get_device_properties=lambda device=None: SimpleNamespace(name=NAME),
    )
    return module


def join(backend: str, *, bound: bool = False) -> torch.device:
    """Replace the default group by one of ``backend``, ``bound`` to this rank's device; returns the device."""
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    device = torch.device(NAME, rank)
    torch.accelerator.set_device_index(rank)
    again = dist.PrefixStore("simulated", store)
    dist.init_process_group(backend, store=again, rank=rank, world_size=size, device_id=device if bound else None)
    return device
