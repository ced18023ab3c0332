"""Atomic writes of text files, and printable text in errors."""

import errno
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.errors import CheckpointError, ConfigError, SMPError, cause_of, is_of_disk, printable
from smp_strategy.planning.output_file import refuse_unwritable, write_atomically


def test_a_text_is_written_with_the_mode_of_the_umask_and_nothing_is_left(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "made" / "x.json", "text")
    finally:
        os.umask(before)
    path = tmp_path / "made" / "x.json"
    assert path.read_text() == "text"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(path.parent.iterdir()) == [path]


def test_links_at_names_that_can_be_foreseen_are_not_followed(tmp_path):
    (tmp_path / "precious").write_text("precious")
    for name in (f".x.json.{os.getpid()}", "x.json", ".x.json.writing"):
        (tmp_path / name).symlink_to("precious")
    write_atomically(tmp_path / "x.json", "text")
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "x.json").read_text() == "text"


def test_a_link_at_the_very_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda count: "known")
    (tmp_path / ".known.writing").symlink_to("precious")
    with pytest.raises(SMPError, match=r"x\.json was not written"):
        write_atomically(tmp_path / "x.json", "text")
    assert not (tmp_path / "precious").exists()


@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, "disk is full"), (errno.EROFS, "read-only"), (errno.EDQUOT, "quota")]
)
def test_a_full_disk_is_told_with_the_path_and_the_old_text_stays(tmp_path, monkeypatch, number, said):
    path = tmp_path / "x.json"
    path.write_text("old")

    def fails(file):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(SMPError, match=f"{path} was not written: .*{said}.*untouched"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_errors_that_libraries_have_wrapped_are_recognised():
    assert is_of_disk(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert "disk is full" in cause_of(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert is_of_disk(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"))
    for other in (
        RuntimeError("no"),
        FileNotFoundError(2, "no"),
        ValueError("os error"),
        ConnectionResetError(104, "x"),
    ):
        assert not is_of_disk(other)


@given(st.text())
def test_texts_become_printable_and_those_that_are_stay(text):
    shown = printable(text, lines=False)
    assert shown.isprintable()
    assert printable(shown) == shown
    shown.encode()


def test_control_characters_of_names_are_shown_in_errors():
    error = CheckpointError("a\x1b[31mred\u202e\udcff\n\tb")
    assert str(error) == "a\\x1b[31mred\\u202e\\udcff\n\tb"
    assert printable("ä [red] :smile: 字\n", lines=False) == "ä [red] :smile: 字\\n"


def test_a_place_that_cannot_be_written_is_refused_before_there_is_anything_to_write(tmp_path):
    (tmp_path / "file").write_text("text")
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "file" / "x.json", "Not a dir"), ("a\0b", "null")):
        with pytest.raises(ConfigError, match=f"`partition_file` .* cannot be written: .*{reason}"):
            refuse_unwritable(path, "partition_file")
    refuse_unwritable(tmp_path / "made" / "x.json", "partition_file")
    refuse_unwritable(tmp_path / "file", "partition_file")
    assert (tmp_path / "file").read_text() == "text"
    assert not list((tmp_path / "made").iterdir())


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/null")
    for name, kind in {"fifo": "a FIFO", "link": "a device"}.items():
        with pytest.raises(ConfigError, match=rf"`partition_file` .*{name}\) is {kind}, which a file would replace"):
            refuse_unwritable(tmp_path / name, "partition_file")
        with pytest.raises(SMPError, match=rf"{name} was not written: it is {kind}"):
            write_atomically(tmp_path / name, "text")
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
    assert (tmp_path / "link").is_symlink()
