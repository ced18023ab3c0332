"""``smp run script.py``: a script of SageMaker's libraries, without an edit.

Such a script imports ``smdistributed.modelparallel.torch`` or ``smdistributed.dataparallel.torch``. Before it starts,
these names are given to ``smp_strategy.smp`` and ``smp_strategy.smddp``, the modules above this package. Where the real
library is installed nothing is given away, so that no script runs on another library than it seems to.
``torch.sagemaker`` (version 2) is refused: it wraps PyTorch's FSDP, which the engine takes the place of.

Processes that Python starts anew (``spawn``, ``forkserver``) import the script again. They find the names by
``sys.path``, on which :mod:`names.smdistributed` is the last entry.
"""

import importlib.util
import os
import runpy
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from torch.nn import Parameter

from smp_strategy.errors import ConfigError, UnsupportedError

__all__ = ["install_names", "main", "run"]

# The latest release with the names of `smp_strategy.smp`; scripts print it, and compare it.
_VERSION: Final = "1.15.0"
_MODEL, _DATA = "smdistributed.modelparallel", "smdistributed.dataparallel"
_NAMES: Final = os.path.join(os.path.dirname(__file__), "names")
_ORIGIN: Final = os.path.join(_NAMES, "smdistributed", "__init__.py")
_USAGE: Final = "python -m smp_strategy.smp script.py [arguments]"


def run(given: Namespace) -> int:
    """Run ``smp run``."""
    return main([given.script, *given.arguments])


def main(arguments: Sequence[str]) -> int:
    """Run a script as ``__main__``; exit status 2: it cannot be started. Errors of the script itself are raised."""
    try:
        if not arguments:
            raise ConfigError(f"There is no script. Usage: {_USAGE}.")
        script = arguments[0]
        if not os.path.isfile(script):
            raise ConfigError(f"There is no script {script}. Give the path of a Python file: {_USAGE}.")
        install_names()
    except ConfigError as error:
        print(f"smp run: {error}", file=sys.stderr)
        return 2
    sys.argv[:] = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    sys.path.append(_NAMES)
    try:
        runpy.run_path(script, run_name="__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{error.name}.".startswith("torch.sagemaker."):
            raise
        raise UnsupportedError(
            f"The script imports `{error.name}`, of version 2 of SageMaker's library, which wraps PyTorch's FSDP. It "
            "is not there: docs/sagemaker.md has a table of what becomes of its calls."
        ) from error
    return 0


def install_names() -> None:
    """Make SageMaker's names importable, unless the real library is installed."""
    present = importlib.util.find_spec("smdistributed")
    if present is not None and present.origin != _ORIGIN:
        raise ConfigError(
            "SageMaker's library (`smdistributed`) is installed, so its names are not given to smp_strategy. Start the "
            "script with `python`, which runs that library, or uninstall it."
        )
    sys.modules.update(_modules())


def _modules() -> dict[str, ModuleType]:
    """Modules under SageMaker's names, packages first."""
    smp: Any = import_module("smp_strategy.smp")
    smddp: Any = import_module("smp_strategy.smddp")

    def of_rank(text: str) -> str:
        return f"[{smp.rank()}] {text}" if smp.is_initialized() else text

    def axis(param: Parameter) -> int | None:
        model = smp.state.model
        cuts = {} if model is None or not model.partitioned else model.engine.layout.split.cuts
        return cuts[param].dim if param in cuts else None

    def of_its_tests(*args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            "`smdistributed.modelparallel.test` has the tests of SageMaker's library, and is not there."
        )

    found: dict[str, ModuleType] = {
        "smdistributed": _made("smdistributed"),
        _MODEL: _made(_MODEL, __version__=_VERSION),
        f"{_MODEL}.torch": smp,
        f"{_MODEL}.torch.state_mod": _made(f"{_MODEL}.torch.state_mod", state=smp.state),
        f"{_MODEL}.torch.utils": _made(f"{_MODEL}.torch.utils", rmsg=of_rank, get_distribution_axis=axis),
        f"{_MODEL}.test": _made(f"{_MODEL}.test"),  # AWS's script for BERT imports two of its functions, and calls none
        f"{_MODEL}.test.torch": _made(f"{_MODEL}.test.torch"),
        f"{_MODEL}.test.torch.utils": _made(f"{_MODEL}.test.torch.utils", dump_model=of_its_tests, verify=of_its_tests),
        _DATA: _made(_DATA),
        f"{_DATA}.torch": _made(f"{_DATA}.torch"),
        f"{_DATA}.torch.torch_smddp": smddp,
        f"{_DATA}.torch.distributed": smddp,
        f"{_DATA}.torch.parallel": _made(
            f"{_DATA}.torch.parallel", DistributedDataParallel=smddp.DistributedDataParallel
        ),
        f"{_DATA}.torch.parallel.distributed": smddp,
    }
    prefix = f"{smp.__name__}."
    of_smp: Mapping[str, Any] = {name: module for name, module in sys.modules.items() if name.startswith(prefix)}
    found.update({f"{_MODEL}.torch.{name.removeprefix(prefix)}": module for name, module in of_smp.items()})
    for name, module in found.items():  # `import a.b.c` binds `a` only, and reads the rest from it
        parent, _, last = name.rpartition(".")
        if parent and not hasattr(found[parent], last):
            setattr(found[parent], last, module)
    return found


def _made(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    spec = ModuleSpec(name, None, origin=_ORIGIN)
    vars(module).update({"__path__": [], "__file__": _ORIGIN, "__spec__": spec, **contents})
    return module
