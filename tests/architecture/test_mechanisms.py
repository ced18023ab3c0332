"""How many mechanisms there are for one thing. A repair extends one that exists.

The table has today's numbers. Who raises one says in the commit why no mechanism that exists could do it; who lowers
one lowers it here.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "smp_strategy"
# Packages that doors (`integrations`) may import: the engine, and those without tensors. The contract "the engine is
# the only front of the doors" (pyproject.toml) says the same; here names of the package for its users are told apart.
FRONT = {"engine", "config", "errors", "integrations", "reports"}
# They replace attributes of single objects, and start threads. They know nothing of this package and are in no layer.
NO_LAYER = {"smp_strategy.model.patching", "smp_strategy.distributed.background_call"}
CONTAINERS = {"dict", "list", "tuple", "set", "Mapping", "Sequence", "list | tuple", "tuple | list"}

# The recursive walks that are left. Each of them does what neither `nodes` (model/trace/pytree.py: nodes with their
# paths) nor torch's pytree (leaves, and the same nest with other leaves) can do:
#   as_text, fits           options, in a package without torch; `fits` walks a type
#   shown, frozen           the text or digest of a nest is put together from those of its parts
#   content_of, _has_all    so is the answer of these two, which depends on the kind of the container
#   encoded, with_lists     the nest changes its form: lists become dicts and back
#   flattened               whether a dict is opened depends on its whole name
#   _all_held               a mapping loses the entries that this rank does not have
#   merge                   walks several nests at a time, which may differ
#   visited, of             rebuild mappings of any class; `of` returns what has not changed itself, at each call
#   _note_lists             an outer list is judged by what was found in it
#   _leaves                 an object counts as several levels
MOST = {
    "subclasses of Tensor": 5,
    "function and dispatch modes": 12,
    "kinds of threads": 4,
    "recursive walks of containers": 15,
    "imports of doors past the engine": 0,
}


@pytest.fixture(scope="module")
def trees():
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def bases(node):
    return {ast.unparse(base).rpartition(".")[2] for base in node.bases}


def subclasses(trees, *names):
    return [
        f"{path.stem}.{node.name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and bases(node) & set(names)
    ]


def threads(trees):
    return [
        f"{path.stem}:{node.lineno}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("threading.Thread", "Thread")
    ]


def is_own(owner):
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls")


def walks(trees):
    """Functions that call themselves and ask whether a value is a container."""
    found = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            inside = list(ast.walk(node))
            names = {each.id for each in inside if isinstance(each, ast.Name)}
            # Not `super().forward`, nor the `forward` of another object: each of these is another function.
            names |= {each.attr for each in inside if isinstance(each, ast.Attribute) and is_own(each.value)}
            asked = {
                ast.unparse(kind)
                for each in inside
                if isinstance(each, ast.Call) and ast.unparse(each.func) == "isinstance" and len(each.args) == 2
                for kind in (each.args[1].elts if isinstance(each.args[1], ast.Tuple) else [each.args[1]])
            }
            if node.name in names and asked & CONTAINERS:
                found.append(f"{path.stem}.{node.name}")
    return found


def imported_by(node, public):
    """Names of modules; names that the package itself has for its users are free to all."""
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    if isinstance(node, ast.ImportFrom) and node.module == "smp_strategy":
        return [f"smp_strategy.{each.name}" for each in node.names if each.name not in public]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def past_the_engine(trees):
    top = trees[PACKAGE / "__init__.py"].body
    named = next(
        each.value for each in top if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__all__"
    )
    public = ast.literal_eval(named)
    return [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, tree in trees.items()
        if path.is_relative_to(PACKAGE / "integrations")
        for node in ast.walk(tree)
        for name in imported_by(node, public)
        if name.startswith("smp_strategy.") and name.split(".")[1] not in FRONT and name not in NO_LAYER
    ]


COUNTED = {
    "subclasses of Tensor": lambda trees: subclasses(trees, "Tensor"),
    "function and dispatch modes": lambda trees: subclasses(trees, "TorchFunctionMode", "TorchDispatchMode"),
    "kinds of threads": threads,
    "recursive walks of containers": walks,
    "imports of doors past the engine": past_the_engine,
}


@pytest.mark.parametrize("mechanism", MOST)
def test_mechanisms_do_not_multiply(mechanism, trees):
    found = COUNTED[mechanism](trees)
    assert len(found) <= MOST[mechanism], "\n".join(found)
    assert len(found) == MOST[mechanism], f"{len(found)} {mechanism} are left: lower the number in `MOST`"
