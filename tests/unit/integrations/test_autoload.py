"""Registering with Lightning: early enough, lazily, and never in anybody's way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def python(code: str, **environment: str) -> str:
    """Run ``code`` in a fresh interpreter and return what it prints."""
    paths = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": paths, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_imports_nothing_heavy():
    code = """
import sys, smp_strategy
smp_strategy.SMPConfig(), smp_strategy.ConfigError
print(sorted({"torch", "lightning", "pytorch_lightning", "numpy", "hydra"} & set(sys.modules)))
"""
    assert python(code) == "[]"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("tree", "order"),
    [
        ("lightning.pytorch", "after"),
        ("lightning.pytorch", "before"),
        ("pytorch_lightning", "before"),
        ("pytorch_lightning", "after"),
    ],
)
def test_smp_is_registered_whichever_import_comes_first(tree, order):
    imports = [f"import {tree}.strategies as strategies", "import smp_strategy"]
    code = "\n".join(imports if order == "before" else reversed(imports))
    more = "import inspect; source = inspect.getsource(strategies)"  # the genuine loader is still there
    assert python(f"{code}\n{more}\nprint('smp' in strategies.StrategyRegistry, len(source) > 100)") == "True True"


def test_it_can_be_switched_off():
    count = """
import sys, smp_strategy
from smp_strategy.integrations.autoload import RegistryFinder
print(sum(isinstance(finder, RegistryFinder) for finder in sys.meta_path))
"""
    assert python(count) == "1"
    assert python(count, SMP_AUTOLOAD="0") == "0"


def test_a_failure_while_registering_does_not_reach_the_import():
    code = """
from smp_strategy.integrations import autoload
def broken(module):
    raise RuntimeError("broken")
autoload.register = broken
import lightning.pytorch.strategies
print("imported")
"""
    assert python(code) == "imported"


def test_a_module_that_is_still_being_imported_is_left_alone():
    code = """
import sys, types, importlib.machinery
from smp_strategy.integrations import autoload
half = types.ModuleType("lightning.pytorch.strategies")
half.__spec__ = importlib.machinery.ModuleSpec("lightning.pytorch.strategies", None)
half.__spec__._initializing = True
sys.modules["lightning.pytorch.strategies"] = half
autoload.autoload()
print("survived")
"""
    assert python(code) == "survived"


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ("import lightning.pytorch", "smp_strategy.integrations.lightning"),
        ("import pytorch_lightning", "smp_strategy.pytorch_lightning"),
        ("", "smp_strategy.integrations.lightning"),
    ],
)
def test_the_strategy_fits_the_lightning_that_the_script_uses(imports, expected):
    assert python(f"{imports}\nfrom smp_strategy import SMPStrategy; print(SMPStrategy.__module__)") == expected


def test_an_unknown_name_is_an_attribute_error():
    import smp_strategy

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = smp_strategy.nonsense
    assert set(smp_strategy.__all__) <= set(dir(smp_strategy))
