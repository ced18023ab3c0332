"""The faults of :mod:`tests.mutations` still fit the code."""

import ast

import pytest

from tests.mutations import MUTATIONS, ROOT, mutated


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_fault_changes_code_that_exists(mutation):
    right = (ROOT / "smp_strategy" / mutation.file).read_text()
    assert ast.dump(ast.parse(mutated(right, mutation))) != ast.dump(ast.parse(right))
