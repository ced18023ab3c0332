"""Where a script was started, although it may have changed its working directory since."""

import pytest

from smp_strategy.config.special_paths import STARTED_IN, started_in


@pytest.mark.parametrize(
    ("script", "given", "folder"),
    [
        ("/a/b/train.py", "train.py", "/a/b"),
        ("/a/./b/train.py", "./b/train.py", "/a"),
        ("/train.py", "train.py", "/"),
        ("/a/train.py", "/a/train.py", STARTED_IN),
        ("/a/b/../train.py", "../train.py", STARTED_IN),
        ("/lib/pytest/__main__.py", "other.py", STARTED_IN),
    ],
)
def test_the_folder_is_found_from_the_path_of_the_script_in_the_command(script, given, folder):
    assert started_in(script, given) == folder
