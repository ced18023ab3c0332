"""Rules of CONTRIBUTING.md that no linter checks. A rule is a test, which names all files and lines that break it."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "smp_strategy"
MODULES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES = 800  # for one concept; two of them are two files
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


@pytest.fixture(scope="module")
def nodes():
    """The syntax of each module; the first node is the module itself."""
    return {path: list(ast.walk(ast.parse(path.read_text()))) for path in MODULES}


def test_a_module_says_what_it_is_for_and_what_is_public(nodes):
    offenders = []
    for path, (module, *_) in nodes.items():
        if not ast.get_docstring(module):
            offenders.append(f"{name_of(path)}:1: no docstring")
        if path.name == "__main__.py" or len(module.body) == 1:
            continue
        assigned = [
            target for node in module.body if isinstance(node, ast.Assign | ast.AnnAssign) for target in ast.walk(node)
        ]
        if not any(isinstance(target, ast.Name) and target.id == "__all__" for target in assigned):
            offenders.append(f"{name_of(path)}:1: no __all__")
    assert not offenders, "\n".join(offenders)


def test_files_and_functions_can_be_held_in_the_head(nodes):
    lines = {path: len(path.read_text().splitlines()) for path in MODULES}
    offenders = [f"{name_of(path)}:{count}: too long" for path, count in lines.items() if count > MOST_LINES]
    for path, inside in nodes.items():
        offenders += [
            f"{name_of(path)}:{node.lineno}: {node.name} is too long"
            for node in inside
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.end_lineno - node.lineno >= MOST_FUNCTION_LINES
        ]
    assert not offenders, "\n".join(offenders)


def test_there_is_no_global_state(nodes):
    offenders = [
        f"{name_of(path)}:{node.lineno}: global {', '.join(node.names)}"
        for path, inside in nodes.items()
        for node in inside
        if isinstance(node, ast.Global)
    ]
    assert not offenders, "\n".join(offenders)


def test_a_class_name_has_one_meaning(nodes):
    homes = defaultdict(list)
    for path, inside in nodes.items():
        for node in inside:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(f"{name_of(path)}:{node.lineno}")
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


def test_pages_name_files_that_exist():
    files = [f"/{name_of(path)}" for path in ROOT.glob("*/**/*.py") if ".venv" not in path.parts]
    ends = {file[start:] for file in files for start, letter in enumerate(file) if letter == "/"}
    offenders = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]:
        text = page.read_text()
        for found in re.finditer(r"`(?P<file>(?:[\w/]+/|test_)\w+\.py)`|\]\((?P<link>[^)]+)\)", text):
            file, link = found["file"], (found["link"] or "").partition("#")[0]
            if f"/{file}" in ends if file else link.startswith("http") or (page.parent / link).exists():
                continue
            line = text.count("\n", 0, found.start()) + 1
            offenders.append(f"{name_of(page)}:{line}: there is no {file or link}")
    assert not offenders, "\n".join(offenders)


def test_each_feature_of_sagemakers_library_has_a_test_or_a_reason():
    table = (ROOT / "docs" / "sagemaker-tested.md").read_text().partition("## Coverage")[2].strip().splitlines()
    rows = [line.strip("| ").split(" | ") for line in table if line.startswith("| ")][1:]
    assert len(rows) >= 55
    for row in rows:
        feature, proof = row
        named = re.findall(r"`([\w/]+(?:\.py)?)`", proof)
        tests = [name for name in named if name.split("/")[0] in TEST_FOLDERS or name.startswith("test_")]
        assert tests or len(proof.split()) >= 4, feature
        folders = [name for name in tests if not name.endswith(".py")]  # files are checked on all pages
        assert all((ROOT / "tests" / name).is_dir() for name in folders), feature


def test_the_map_of_a_package_names_all_that_is_in_it(nodes):
    offenders = []
    for path, (module, *_) in nodes.items():
        # The public names; CONTRIBUTING.md has the map. The groups of Hydra.
        if path.name != "__init__.py" or path.parent == PACKAGE or path.parent.name == "configs":
            continue
        words = set(re.findall(r"\w+", ast.get_docstring(module)))
        inside = {each.stem for each in path.parent.glob("*.py")} | {
            each.parent.name for each in path.parent.glob("*/__init__.py")
        }
        offenders += [f"{name_of(path)}:1: {name} is not in the map" for name in inside - {"__init__"} - words]
    assert not offenders, "\n".join(offenders)


TEST_FOLDERS = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
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


def test_special_cases_of_the_pipeline_do_not_know_each_other(nodes):
    rooms = {path.parent.name for path in (PACKAGE / "pipeline").glob("*/__init__.py")}
    offenders = []
    for path, inside in nodes.items():
        room = path.relative_to(PACKAGE).parts[1] if path.is_relative_to(PACKAGE / "pipeline") else ""
        for node in inside if room in rooms else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("smp_strategy.pipeline."):
                other = node.module.split(".")[2]
                # Messages know no program at all.
                if other != room and (other in rooms or room == "transport"):
                    offenders.append(f"{name_of(path)}:{node.lineno}: {node.module}")
    assert len(rooms) == 6
    assert not offenders, "\n".join(offenders)


def test_ranks_wait_for_each_other_in_the_way_that_is_watched(nodes):
    bare = []
    for path, inside in nodes.items():
        # In a step, what users call becomes an operation of the step.
        if name_of(path) in WATCHED or name_of(path) == "smp_strategy/integrations/lightning/delegating_strategy.py":
            continue
        for node in inside:
            is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if not (is_method and node.func.attr in COLLECTIVES):
                continue
            of_torch = ast.unparse(node.func.value) in ("dist", "torch.distributed", "distributed")
            # One that is begun by `collectives.begin` is waited for there.
            if of_torch and not any(keyword.arg == "async_op" for keyword in node.keywords):
                bare.append(f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}")
    assert not bare, "\n".join(bare)


def test_private_functions_of_pytorch_are_called_in_one_place():
    private = re.compile(r"torch\._C\b|_execution_engine|distributed_c10d\._|torch\._dynamo\.eval_frame")
    homes = ("smp_strategy/distributed/torch_private.py", "smp_strategy/model/compiled_code.py")
    offenders = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in MODULES
        if name_of(path) not in homes
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if private.search(line)
    ]
    assert not offenders, "\n".join(offenders)
