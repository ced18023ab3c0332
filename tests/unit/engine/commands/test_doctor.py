"""``smp doctor`` on machines of all kinds: what works there, what to install, and the exit status."""

import argparse
import dataclasses

import pytest

from smp_strategy.cli import main
from smp_strategy.engine.commands import doctor
from smp_strategy.engine.commands.doctor import PACKAGES, Examination, Tried, examine, render

HERE = Examination(
    versions=dict.fromkeys(PACKAGES, "1.0"),
    version="0.2.0",
    python="3.11.7",
    system="Linux 6",
    cores=4,
    memory=8 * 2**30,
    shared_memory=4 * 2**30,
    accelerators=(),
    no_accelerator="this PyTorch is built for CPUs only",
    transports=(Tried("shared_memory", 3e9), Tried("gloo", 1e9)),
    compiler="/usr/bin/c++",
    is_autoloaded=True,
)


def told(**changes):
    return render(dataclasses.replace(HERE, **changes))


def without(*names):
    return {"versions": {name: None if name in names else "1.0" for name in PACKAGES}}


def test_a_machine_that_has_all_needs_nothing():
    assert HERE.works
    assert "shared_memory   3.0 GB/s" in told()
    assert 'Trainer(strategy="smp", accelerator="cpu", devices=4)' in told()
    assert "What to install" not in told()


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (without("accelerate"), ["pip install accelerate: ", "(only if you want it)"]),
        (without("jsonargparse"), ["pip install 'jsonargparse[signatures]'"]),
        ({"unfit": ("torch 9.9 is installed, but",)}, ["What to install or change\n  torch 9.9 is installed"]),
        (without("lightning"), ["no training on two ranks: see below", "pip install lightning: the door"]),
        ({"is_autoloaded": False}, ["needs `import smp_strategy` in the script"]),
        ({"shared_memory": 64 * 2**20}, ["64.0 MiB free in /dev/shm", "--shm-size"]),
        ({"shared_memory": None}, ["no /dev/shm", "--shm-size"]),
        ({"compiler": None}, ["a C++ compiler"]),
        (
            {"transports": (Tried("shared_memory", None, "not allowed"), Tried("gloo", 1e9))},
            ["shared_memory   does not work: not allowed", 'Trainer(strategy="smp"'],
        ),
        (
            {"transports": (Tried("two processes", None, "no answer within 120 s"),)},
            ["no training on two ranks", "GLOO_SOCKET_IFNAME"],
        ),
        ({"accelerators": ("cuda:0 X, 80.0 GiB", "cuda:1 X, 80.0 GiB")}, ["cuda:1 X", 'strategy="smp", devices=2)']),
        ({"accelerators": ("cuda:0 X, 80.0 GiB",)}, ["one accelerator"]),
        ({"variables": ("SMP_CONFIG=pp2",)}, ["Environment\n  SMP_CONFIG=pp2"]),
    ],
)
def test_what_is_missing_is_told_with_its_remedy(changes, lines):
    for line in lines:
        assert line in told(**changes)


def test_this_machine_is_examined_without_starting_processes(monkeypatch):
    monkeypatch.setenv("SMP_MICROBATCHS", "4")
    found = examine(with_transports=False)
    assert found.works
    assert found.transports == ()
    assert found.versions["torch"]
    assert found.cores >= 1
    assert any("Did you mean SMP_MICROBATCHES?" in each for each in found.variables)


def test_versions_outside_of_the_ranges_of_the_project_are_named(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ["torch>=2.11,<2.16", "peft>=0.15; extra == 'x'"])
    monkeypatch.setattr(doctor, "_version", lambda name: "2.16.0+cu130")
    assert [each.partition(" is installed")[0] for each in doctor._unfit()] == ["torch 2.16.0+cu130"]


@pytest.mark.parametrize(("found", "status"), [(HERE, 0), (dataclasses.replace(HERE, **without("torch")), 1)])
def test_the_exit_status_says_whether_ranks_can_train(found, status, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(doctor, "examine", lambda with_transports: asked.append(with_transports) or found)
    assert main(["doctor", "--quick"]) == status
    assert doctor.run(argparse.Namespace(quick=False)) == status
    assert asked == [False, True]
    assert capsys.readouterr().out.startswith("smp_strategy 0.2.0, Python 3.11.7, Linux 6\n")
