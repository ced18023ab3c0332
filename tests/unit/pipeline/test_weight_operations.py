"""Models whose weights a later step may begin to write to."""

import pytest
import torch

from smp_strategy.model.units import Unit
from smp_strategy.pipeline.shared_tensors.weight_operations import has_teacher


@pytest.mark.parametrize(
    ("frozen", "trained", "found"),
    [
        ("teacher", "student", True),
        ("teacher.blocks.3", "student.blocks.3", True),
        ("momentum.net.blocks.3", "net.blocks.3", True),
        ("blocks.3", "blocks.7", False),
        ("teacher.blocks.3", "student.blocks.4", False),
        ("nets.0", "nets.1", False),
    ],
)
def test_a_teacher_has_the_path_of_its_student_but_for_names(frozen, trained, found):
    units = [Unit(name, torch.nn.Linear(4, 4)) for name in (frozen, trained)]
    of_the_optimizer = {id(each) for each in units[1].module.parameters()}
    assert has_teacher(units, of_the_optimizer) is found


def test_a_unit_of_another_size_or_without_weights_is_no_teacher():
    student = Unit("student", torch.nn.Linear(4, 4))
    others = [Unit("teacher", torch.nn.Linear(4, 5)), Unit("activation", torch.nn.ReLU())]
    assert not has_teacher([student, *others], {id(each) for each in student.module.parameters()})
    assert not has_teacher([Unit("a", torch.nn.ReLU()), Unit("b", torch.nn.ReLU())], set())
