"""How many mechanisms there are for one thing. A repair extends one that exists.

The table has today's numbers. Who raises one says in the commit why no mechanism that exists could do it; who lowers
one lowers it here.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "smp_strategy"
# What the doors (`integrations`) may know: the engine, and what has no tensors in it.
FRONT = {"engine", "config", "errors", "integrations", "reports"}
# It replaces attributes of single objects and knows nothing of this package, so it is no part of a layer.
NO_LAYER = {"smp_strategy.model.patching"}
CONTAINERS = {"dict", "list", "tuple", "set", "Mapping", "Sequence", "list | tuple", "tuple | list"}

MOST = {
    "subclasses of Tensor": 5,
    "function and dispatch modes": 13,
    "kinds of threads": 8,  # goal: 5
    "recursive walks of containers": 25,  # goal: 15
    "imports of doors past the engine": 27,  # goal: 0
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


def walks(trees):
    """Functions that call themselves and ask whether a value is a container."""
    found = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            inside = list(ast.walk(node))
            names = {each.id for each in inside if isinstance(each, ast.Name)}
            names |= {each.attr for each in inside if isinstance(each, ast.Attribute)}
            asked = {
                ast.unparse(kind)
                for each in inside
                if isinstance(each, ast.Call) and ast.unparse(each.func) == "isinstance" and len(each.args) == 2
                for kind in (each.args[1].elts if isinstance(each.args[1], ast.Tuple) else [each.args[1]])
            }
            if node.name in names and asked & CONTAINERS:
                found.append(f"{path.stem}.{node.name}")
    return found


def past_the_engine(trees):
    return [
        f"{path.relative_to(PACKAGE)}: {node.module}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("smp_strategy.")
        if path.is_relative_to(PACKAGE / "integrations") and node.module.split(".")[1] not in FRONT
        if node.module not in NO_LAYER
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
