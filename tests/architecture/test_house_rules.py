"""Rules of CONTRIBUTING.md that no linter checks."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "smp_strategy"
MODULES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES = 500  # the aim is 400
MOST_FUNCTION_LINES = 60  # the aim is 50
MOST_WORDS = 20  # of our own
MOST_ENTRIES_AT_THE_TOP = 20  # thirteen packages; modules are what others import or start, and errors
# One role in several packages; every other file name says alone where it belongs.
ROLES = {
    *("__init__.py", "annotations.py", "collectives.py", "data.py", "manual_optimization.py", "page.py"),
    *("text.py", "validation.py", "verify.py"),
}


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_says_what_it_is_for_and_what_is_public(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "no docstring"
    if path.name == "__main__.py" or len(tree.body) == 1:
        return
    assigned = [
        target for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) for target in ast.walk(node)
    ]
    assert any(isinstance(target, ast.Name) and target.id == "__all__" for target in assigned), "no __all__"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_files_and_functions_can_be_held_in_the_head(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < MOST_FUNCTION_LINES, node.name


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_there_is_no_global_state(path):
    assert not [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Global)]


def test_a_class_name_has_one_meaning():
    homes = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name_of(path))
    assert not {name: found for name, found in homes.items() if len(found) > 1}


def test_a_file_name_has_one_meaning():
    homes = defaultdict(list)
    for path in MODULES:
        homes[path.name].append(name_of(path))
    assert not {name: found for name, found in homes.items() if len(found) > 1 and name not in ROLES}


def test_the_top_of_the_package_can_be_held_in_the_head():
    # `configs` is a link to the Hydra groups of the repository.
    entries = [
        path.name
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path.is_dir() and path.name not in ("configs", "__pycache__"))
    ]
    assert len(entries) <= MOST_ENTRIES_AT_THE_TOP, sorted(entries)


def test_words_of_our_own_are_few_and_live_in_files():
    entries = re.split(r"^- (?=\*\*)", (ROOT / "docs" / "concepts.md").read_text(), flags=re.MULTILINE)[1:]
    assert len(entries) <= MOST_WORDS
    for entry in entries:
        homes = re.findall(r"`([\w/]+\.py)`", entry)
        assert homes, entry
        assert all((PACKAGE / home).exists() for home in homes), entry


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *sorted(map(name_of, ROOT.glob("docs/*.md")))])
def test_pages_name_files_that_exist(page):
    page = ROOT / page
    files = {f"/{name_of(path)}" for path in ROOT.glob("*/**/*.py") if ".venv" not in path.parts}
    named = set(re.findall(r"`([\w/]+/\w+\.py)`", page.read_text()))
    assert not {name for name in named if not any(file.endswith(f"/{name}") for file in files)}
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", page.read_text())]
    assert not [link for link in links if not link.startswith("http") and not (page.parent / link).exists()]


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.name == "__init__.py" and path.parent.name != "configs"], ids=name_of
)
def test_the_map_of_a_package_names_all_that_is_in_it(path):
    if path.parent == PACKAGE:
        return  # public names; CONTRIBUTING.md has the map
    words = set(re.findall(r"\w+", ast.get_docstring(ast.parse(path.read_text()))))
    inside = {each.stem for each in path.parent.glob("*.py")} | {
        each.parent.name for each in path.parent.glob("*/__init__.py")
    }
    assert not inside - {"__init__"} - words


WATCHED = {"smp_strategy/distributed/watched_collectives.py", "smp_strategy/distributed/deadlock.py"}
COLLECTIVES = {
    *("all_gather", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "recv", "reduce"),
    *("reduce_scatter", "scatter", "send", "recv_object_list", "send_object_list", "all_gather_into_tensor"),
}


def test_the_core_of_the_pipeline_can_be_read_in_one_sitting():
    pages = (PACKAGE / "pipeline" / "__init__.py").read_text().split("==\n")
    core = re.findall(r"^(\w+) ", pages[1], re.MULTILINE)
    lines = [len((PACKAGE / "pipeline" / f"{name}.py").read_text().splitlines()) for name in core]
    assert len(core) <= 13
    assert sum(lines) <= 2500


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_ranks_wait_for_each_other_in_the_way_that_is_watched(path):
    # In a step, what users call becomes an operation of the step.
    if name_of(path) in WATCHED or name_of(path) == "smp_strategy/integrations/lightning/collectives.py":
        return
    bare = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in COLLECTIVES):
            continue
        of_torch = ast.unparse(node.func.value) in ("dist", "torch.distributed", "distributed")
        # One that is begun by `collectives.begin` is waited for there.
        if of_torch and not any(keyword.arg == "async_op" for keyword in node.keywords):
            bare.append(ast.unparse(node))
    assert not bare


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_private_functions_of_pytorch_are_called_in_one_place(path):
    if name_of(path) in ("smp_strategy/distributed/torch_private.py", "smp_strategy/model/compiled_code.py"):
        return
    assert not re.findall(
        r"torch\._C\b|_execution_engine|distributed_c10d\._|torch\._dynamo\.eval_frame", path.read_text()
    )
