"""The README's script until its first step, beside the same script with Lightning's ``strategy="ddp"``::

    python benchmarks/start.py            # three rounds, two minutes on two cores
    python benchmarks/start.py --quick    # one round of one epoch: does it run?

Both start two processes on this machine. They import Lightning one after the other, because the first one must have
reached ``fit`` before it is known that there will be a second one. Rounds alternate, and figures are medians.

The last line is JSON:

* ``start_over_ddp``: seconds from the command until the first step of rank 0 has ended, over those of DDP.
* ``cpu_over_ddp``: seconds of CPU time of both ranks until then, over those of DDP. Other programs on the machine
  disturb them less.
* ``script_over_ddp`` and ``script_cpu_over_ddp``: the same until the script has ended. The model is so small that a
  step of DDP takes a few milliseconds, whereas the pipeline runs it once per microbatch.
* ``import_over_lightning``: CPU time of rank 0 until the Trainer is made, which imports this package, over that until
  Lightning and PyTorch are imported.
* ``first_step_cpu``: seconds of CPU time of the busier rank from then on until its first step has ended.

Python keeps the bytecode of what it imports; where it must not (``PYTHONDONTWRITEBYTECODE``), this package is compiled
in each process, which takes half a second. So the variable does not reach the script here.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
TRAINER = 'L.Trainer(strategy="smp", accelerator="cpu", devices=2, max_epochs=5).fit(Sorter(), data)'
# Instead of the README's imports, and of its last line.
IMPORTS = """
import json, os, sys, time
import lightning as L
import torch

told = {"imports": time.process_time()}


class FirstStep(L.Callback):
    def on_train_batch_end(self, *_):
        told.setdefault("first step", time.process_time())
        told.setdefault("first step at", time.time())
"""
END = """
    trainer = L.Trainer(
        strategy=sys.argv[1], accelerator="cpu", devices=2, max_epochs=int(sys.argv[2]), callbacks=[FirstStep()]
    )
    told["trainer"] = time.process_time()
    trainer.fit(Sorter(), data)
    told["end"] = time.process_time()
    with open(os.environ.get("LOCAL_RANK", "0"), "w") as file:
        json.dump(told, file)
"""


def script() -> str:
    """The README's script, which tells how long its parts took."""
    found = re.search(r"```python\n(.*?)```\n", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    code = found[1].replace("import lightning as L\nimport torch\n", IMPORTS).replace(TRAINER, END.strip())
    assert "first step" in code
    assert "sys.argv[1]" in code
    return code


def run(strategy: str, epochs: int) -> dict[str, float]:
    """Run the script with a strategy and return its figures."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text(script())
        begin = time.time()
        command = [sys.executable, "script.py", strategy, str(epochs)]
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        seconds = time.time() - begin
        ranks: list[dict[str, Any]] = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(2)]
    return {
        "start": ranks[0]["first step at"] - begin,
        "start CPU": sum(rank["first step"] for rank in ranks),
        "script": seconds,
        "script CPU": sum(rank["end"] for rank in ranks),
        "imports": ranks[0]["trainer"] / ranks[0]["imports"],
        "first step": max(rank["first step"] - rank["trainer"] for rank in ranks),
    }


def main(arguments: Sequence[str]) -> None:
    """Print the figures."""
    rounds, epochs = (1, 1) if "--quick" in arguments else (3, 5)
    if rounds > 1:
        run("smp", 1)  # what is read from disk is in memory from here on
    found = [{strategy: run(strategy, epochs) for strategy in ("ddp", "smp")} for _ in range(rounds)]
    for each in found:
        for strategy, figures in each.items():
            print(f"{strategy}  " + "  ".join(f"{name}: {value:.2f}" for name, value in figures.items()))
    ratio = {name: median(each["smp"][name] / each["ddp"][name] for each in found) for name in found[0]["smp"]}
    figures = {
        "start_over_ddp": ratio["start"],
        "cpu_over_ddp": ratio["start CPU"],
        "script_over_ddp": ratio["script"],
        "script_cpu_over_ddp": ratio["script CPU"],
        "import_over_lightning": median(each["smp"]["imports"] for each in found),
        "first_step_cpu": median(each["smp"]["first step"] for each in found),
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
