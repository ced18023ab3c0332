"""Simulated accelerator: the device type ``simulated``, in host memory, whose streams lag behind.

Work that is queued on a stream is done when somebody waits for it, and no earlier, or on a random schedule
(:func:`lag`); memory that nobody has written to is not a number. So a missing wait between streams gives wrong values
without a GPU. There are four devices, with operators of the CPU, and a backend for process groups of that name, which
has a stream of its own, as NCCL has.

The extension (``csrc``) is compiled once, by the compiler of torch's extensions, and kept in ``build/simulated`` of
the repository. A process that loads it has an accelerator from then on, so only ranks of their own should.

* ``queues.h``: the streams' work, and when it is done.
* ``device.h``: devices, streams, events, memory and generators, as torch asks for them.
* ``accelerator.cpp``: operators and copies.
* ``collectives.cpp``: the backend for process groups.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

__all__ = ["build", "lag", "load"]

SOURCES = Path(__file__).parent / "csrc"
BUILT = Path(__file__).parents[2] / "build" / "simulated"
NAME = "simulated"


def build() -> Path:
    """Compile the extension, unless it is there; the test is skipped where there is no compiler."""
    from torch.utils import cpp_extension

    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("the simulated accelerator needs a compiler for C++ (g++, or that of CXX)")
    sources = sorted(SOURCES.iterdir())
    key = hashlib.sha256("".join([torch.__version__, sys.version, *map(Path.read_text, sources)]).encode())
    found = BUILT / f"{key.hexdigest()[:16]}.so"
    if found.exists():
        return found
    BUILT.mkdir(parents=True, exist_ok=True)
    folders = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    flags = ["-std=c++20", "-O1", "-fPIC", f"-DTORCH_EXTENSION_NAME={NAME}", *(f"-I{folder}" for folder in folders)]
    under_way = BUILT / f"{os.getpid()}"
    objects = [Path(f"{under_way}-{source.stem}.o") for source in sources if source.suffix == ".cpp"]
    try:
        compiles = [
            subprocess.Popen([compiler, *flags, "-c", SOURCES / f"{made.stem.split('-')[1]}.cpp", "-o", made])
            for made in objects
        ]
        assert [each.wait() for each in compiles] == [0] * len(compiles)
        libraries = [f"-L{folder}" for folder in cpp_extension.library_paths()]
        needed = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        linked = under_way.with_suffix(".so")
        subprocess.run([compiler, "-shared", *objects, *libraries, *needed, "-o", linked], check=True)
        linked.replace(found)
    finally:
        for each in objects:
            each.unlink(missing_ok=True)
    return found


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

    def backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return extension.backend(store, rank, size)

    dist.Backend.register_backend(NAME, backend, devices=[NAME])
    dist.Backend.backend_capability["gloo"].append(NAME)  # for ranks that share a device


def lag(seed: int = 0) -> None:
    """Choose when work is done: 0: when somebody waits for it; another number: some of it earlier, at random."""
    torch.ops.simulated.seed(seed)


def _device_module() -> ModuleType:
    ops, count = torch.ops.simulated, torch.accelerator.device_count()
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
