"""What an installation gets: dependencies that are pinned, and files that are found."""

import tomllib
from importlib import resources
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

DEPENDENCIES = PROJECT["project"]["dependencies"] + [
    text for extra in PROJECT["project"]["optional-dependencies"].values() for text in extra
]


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("dependency", DEPENDENCIES)
def test_every_direct_dependency_is_pinned_inside_its_range(dependency):
    wanted = Requirement(dependency)
    [pin] = [pin for pin in pins() if pin.name == wanted.name]
    [exact] = pin.specifier
    assert exact.operator == "=="
    assert wanted.specifier.contains(exact.version)


def test_nothing_is_pinned_that_is_not_a_direct_dependency():
    assert {pin.name for pin in pins()} == {Requirement(text).name for text in DEPENDENCIES}


def test_the_namespace_of_hydra_plugins_is_shared_with_other_projects():
    assert not (ROOT / "hydra_plugins" / "__init__.py").exists()


def test_the_groups_for_any_application_are_package_data():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["smp_strategy.configs"]
    configs = resources.files("smp_strategy.configs")
    for pattern in patterns:
        folder, _, name = pattern.rpartition("/")
        assert [file for file in configs.joinpath(folder).iterdir() if Path(file.name).match(name)], pattern
