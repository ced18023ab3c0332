"""The short version of ``python -m tests.crash_while_saving``."""

from tests.crash_while_saving import crash


def test_whoever_is_killed_while_saving_leaves_whole_checkpoints(tmp_path):
    outcome = crash(12, tmp_path)
    assert outcome.saves >= 24
    assert outcome.in_the_middle
