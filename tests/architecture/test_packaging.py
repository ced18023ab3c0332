"""What an installation gets: dependencies that are pinned and complete, and files that are found."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from importlib import metadata, resources
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


# Folder: extras that its files may import beside the dependencies. `make setup` installs the first three.
EXTRAS_OF = {
    "smp_strategy": ("accelerate",),
    "examples": ("examples",),
    "docs": ("docs", "browser", "examples"),
    "benchmarks": ("accelerate", "examples", "dev"),
    "tests": ("accelerate", "examples", "dev"),
    "tests/programs": ("accelerate", "examples", "dev", "programs"),
}
# Imported if the user has it, or compared with if it is installed.
OPTIONAL = {
    "smp_strategy": {"transformers", "peft"},
    "benchmarks": {"deepspeed", "h5py"},
    "examples": {"ray"},
    "tests": {"ray"},
}


@pytest.mark.parametrize("folder", EXTRAS_OF)
def test_extras_name_all_that_files_import(folder):
    """A file of a folder runs in an environment with the extras of the folder and nothing else."""
    project = PROJECT["project"]
    named = [*project["dependencies"]] + [
        text for extra in EXTRAS_OF[folder] for text in project["optional-dependencies"][extra]
    ]
    known = {canonicalize_name(Requirement(text).name) for text in named} | OPTIONAL.get(folder, set())
    # torch brings sympy and its type stubs; pyyaml and packaging come with lightning, fsspec with torch.
    known |= brought(known) if folder != "smp_strategy" else {"sympy", "packaging"}
    offenders = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if folder != "tests" or "programs" not in path.parts
        for name in third_party(path)
        if not known & distributions(name)
    ]
    assert not offenders, "\n".join(offenders)


def brought(names):
    """Distributions that are installed with ``names`` at once: those that they require without a condition."""
    found = set()
    for name in names:
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found |= {canonicalize_name(Requirement(text).name) for text in required if ";" not in text}
    return found


# A syntax tree of each of a thousand files would take ten times as long.
IMPORT = re.compile(r"^ *(?:from (\w+)[\w.]* import\b|import (\w+)[\w.]*(?: as \w+)?(?: *#.*)?$)", re.MULTILINE)


def third_party(path):
    ours = {
        "smp_strategy",
        "hydra_plugins",
        "tests",
        "benchmarks",
        "smdistributed",
        "conftest",
        "__main__",
        "toy_training",
    }
    ours |= {each.stem for folder in (path.parent, ROOT / "examples") for each in folder.glob("*.py")}
    tops = {first or second for first, second in IMPORT.findall(path.read_text())}
    return sorted(tops - ours - set(sys.stdlib_module_names))


def distributions(module):
    return {canonicalize_name(name) for name in homes().get(module, [module])}


@cache
def homes():
    return metadata.packages_distributions()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that is built from the unpacked sdist, which is built from a copy: without leftovers of this one."""
    folder = tmp_path_factory.mktemp("built")
    for name in ("smp_strategy", "hydra_plugins", "configs", "tests/architecture"):
        shutil.copytree(
            ROOT / name, folder / "copy" / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, folder / "copy")
    code = (
        "import os, sys, tarfile\nimport setuptools.build_meta as backend\n"
        f"folder = {str(folder)!r}\nsdist = backend.build_sdist(folder)\nos.chdir(folder)\n"
        "tarfile.open(sdist).extractall(filter='data')\nos.chdir(sdist.removesuffix('.tar.gz'))\n"
        "backend.build_wheel(folder)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder / "copy", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    [built] = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_has_the_package_its_license_and_nothing_else(wheel):
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "smp_strategy").rglob("*.py")}
    assert modules | {"smp_strategy/py.typed"} <= set(names) | {"smp_strategy/configs/__init__.py"}
    assert {name.partition("/")[0] for name in names} == {"smp_strategy", "hydra_plugins"}
    assert {"smp_strategy/configs/smp/pp2_sdp2.yaml", "smp_strategy/configs/trainer/smp.yaml"} <= set(names)
    [license_file] = [name for name in wheel.namelist() if name.endswith("/licenses/LICENSE")]
    assert wheel.read(license_file) == (ROOT / "LICENSE").read_bytes()
    assert not [name for name in names if not name.endswith((".py", ".yaml", "py.typed"))]


def test_metadata_say_what_companies_and_search_engines_ask_for(wheel):
    [file] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    told = wheel.read(file).decode()
    for line in ("License-Expression: Apache-2.0", "License-File: LICENSE", "Author: The smp_strategy authors"):
        assert f"\n{line}\n" in told
    assert "\nClassifier: Typing :: Typed\n" in told
    assert "\nKeywords: " in told


def test_all_that_name_a_version_name_the_same():
    version = PROJECT["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    newest = re.search(r"^## \[(\d[^]]*)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest[1] == version


@pytest.mark.parametrize(
    "path", [".pre-commit-config.yaml", *(f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("bug", "idea", "model"))]
)
def test_files_that_other_programs_read_have_their_keys(path):
    read = yaml.safe_load((ROOT / path).read_text())
    if "repos" in read:
        hooks = [hook for repo in read["repos"] for hook in repo["hooks"]]
        commands = re.findall(
            r"\$\(BIN\)/([\w-]+)",
            re.search(r"^lint:.*?\n\n", (ROOT / "Makefile").read_text(), re.DOTALL | re.MULTILINE)[0],
        )
        assert {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in hooks} == set(commands)
        return
    fields = read["body"]
    assert read["name"]
    assert read["description"]
    assert {field["type"] for field in fields} <= {"textarea", "input", "dropdown", "markdown", "checkboxes"}
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
