"""Registering with Lightning: early enough, lazily, and never in anybody's way."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def start(code: str, **environment: str) -> "subprocess.Popen[str]":
    """A fresh interpreter that runs ``code``."""
    paths = os.pathsep.join([str(ROOT), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": paths, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def python(code: str, **environment: str) -> str:
    """Run ``code`` in a fresh interpreter and return what it prints."""
    process = start(code, **environment)
    told, _ = process.communicate(timeout=100)
    assert process.returncode == 0, told
    return told.strip()


# An interpreter that has imported what Lightning imports, and neither Lightning nor this package. It runs each code
# that it is given in a forked process, and says with which exit code that has ended.
PREPARED = """
import json, os, sys, traceback
import torch._dynamo, torch.onnx, torchmetrics
assert not {"lightning", "pytorch_lightning", "smp_strategy"} & sys.modules.keys()
for line in sys.stdin:
    code, told = json.loads(line)
    child = os.fork()
    if not child:
        file = open(told, "w")
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        ended = 1
        try:
            exec(code, {"__name__": "__main__"})
            ended = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """As :func:`python`, without the time that it takes to import PyTorch."""
    told = tmp_path_factory.mktemp("prepared") / "told.txt"
    process = start(PREPARED)
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(code: str) -> str:
        process.stdin.write(json.dumps([code, str(told)]) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline().strip()
        assert answer == "0", answer + told.read_text()
        return told.read_text().strip()

    yield ask
    process.communicate(timeout=100)


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
def test_smp_is_registered_whichever_import_comes_first_and_fits_the_lightning_that_the_script_uses(
    tree, order, prepared
):
    imports = [f"import {tree}.strategies as strategies", "import smp_strategy"]
    code = "\n".join(imports if order == "before" else reversed(imports))
    more = """
import inspect
source = inspect.getsource(strategies)  # the genuine loader is still there
registry = strategies.StrategyRegistry
print("smp" in registry, len(source) > 100, smp_strategy.SMPStrategy.__module__)
config = registry.get("smp_pp2_sdp2").config
print(config.pipeline_parallel_degree, config.microbatches, config.sharded_data_parallel_degree)
print("smp_pp2" in registry.available_strategies(), "ddp" in registry, "smpx" in registry.available_strategies())
"""
    home = {"lightning.pytorch": "integrations.lightning", "pytorch_lightning": "pytorch_lightning"}[tree]
    assert prepared(code + more) == f"True True smp_strategy.{home}\n2 None 2\nTrue True False"


@pytest.mark.parametrize("fabric", ["lightning.fabric", "lightning_fabric"])
def test_fabric_says_that_it_has_no_such_strategy(fabric, prepared):
    code = f"""
import {fabric} as fabric, smp_strategy
try:
    fabric.Fabric(strategy="smp", accelerator="cpu", devices=2)
except smp_strategy.UnsupportedError as error:
    print(error)
"""
    assert 'there is no strategy for Fabric. Use `Trainer(strategy="smp")`' in prepared(code)


def test_it_can_be_switched_off():
    count = """
import sys, smp_strategy
from smp_strategy.integrations.autoload import RegistryFinder
print(sum(isinstance(finder, RegistryFinder) for finder in sys.meta_path))
"""
    assert python(count) == "1"
    assert python(count, SMP_AUTOLOAD="0") == "0"


def test_a_failure_while_registering_does_not_reach_the_import_of_the_newer_lightning(prepared):
    """Which is the one that is imported where the script has not chosen."""
    code = """
import sys
from smp_strategy.integrations import autoload
def broken(module):
    tried.append(module.__name__)
    raise RuntimeError("broken")
tried, autoload.register = [], broken
from smp_strategy import SMPStrategy
print("lightning.pytorch.strategies" in tried, SMPStrategy.__module__)
"""
    assert prepared(code) == "True smp_strategy.integrations.lightning"


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


def test_an_unknown_name_is_an_attribute_error():
    import smp_strategy

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = smp_strategy.nonsense
    assert set(smp_strategy.__all__) <= set(dir(smp_strategy))
