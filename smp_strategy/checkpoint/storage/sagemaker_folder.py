"""Folder of tagged checkpoints, in the layout of SageMaker's library.

The file ``newest`` has the tag of the checkpoint written last. It is written after that is complete, so it names a
complete one at any time, and that one is never deleted.
"""

from pathlib import Path
from typing import Any, Final, final

from smp_strategy.checkpoint.storage import atomic_commit as commit
from smp_strategy.checkpoint.storage.path_kind import foreign_entries
from smp_strategy.errors import CheckpointError, ConfigError

__all__ = ["TaggedFolder"]

_NEWEST: Final = "newest"
_PARTIAL: Final = "_partial"
_CONTENT: Final = "user_content_"
_LONGEST: Final = 150  # bytes, of 255 of a file name: prefix and suffix need the rest


@final
class TaggedFolder:
    """Paths of one tagged checkpoint.

    Attributes:
        tag: As given.
        partial: Path of the sharded directory.
        full: Path of the full file.
        content: Path of the user's additions to the full file.

    Raises:
        ConfigError: the tag cannot be the name of a file, or would be taken for something else.
    """

    def __init__(self, folder: Path, tag: str) -> None:
        _check(tag)
        self._folder = folder
        self.tag = tag
        self.partial = folder / f"{tag}{_PARTIAL}"
        self.full = folder / tag
        self.content = folder / f"{_CONTENT}{tag}"

    @classmethod
    def to_read(cls, folder: Path, tag: str | None, *, partial: bool) -> "TaggedFolder":
        """An existing checkpoint.

        Args:
            folder: Folder of the checkpoints.
            tag: Tag; ``None``: the newest.
            partial: Whether the sharded form is read.

        Raises:
            CheckpointError: there is none.
        """
        commit.recover_all(folder)
        found = cls(folder, _newest(folder) if tag is None else tag)
        wanted, other = (found.partial, found.full) if partial else (found.full, found.partial)
        if wanted.exists():
            return found
        named = f"which `{folder / _NEWEST}` names" if tag is None else "which was asked for"
        reason = f"{wanted} is not there, the checkpoint {named}."
        remedy = (
            f"It was saved with `partial={not partial}`: load it so, or name another tag."
            if other.exists()
            else ("Name another tag.")
        )
        raise CheckpointError(f"{reason} {remedy} {_present(folder)}")

    def check_limit(self, limit: Any) -> None:
        """Refuse to keep no checkpoint at all."""
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise ConfigError(
                f"`num_kept_partial_checkpoints` must be at least 1, or None to keep all of them, but is {limit!r}: "
                "the one that is written now stays."
            )

    def announce(self) -> None:
        """Mark this checkpoint, which is complete, as the newest."""
        with commit.replacing(self._folder / _NEWEST, is_folder=False) as staging:
            staging.write_text(self.tag, encoding="utf-8")

    def delete_oldest(self, limit: int) -> list[Path]:
        """Delete old partial checkpoints until there are ``limit``, never this one; returns the deleted paths.

        A folder that has files other than those of a checkpoint is not counted, and stays.
        """
        found = [each for each in _partial_ones(self._folder) if each != self.partial]
        others = [each for each in found if not foreign_entries(each)]
        if self.partial.exists():
            limit -= 1
        surplus = others[: max(len(others) - limit, 0)]
        for each in surplus:
            commit.remove(each)
        return surplus


def _partial_ones(folder: Path) -> list[Path]:
    """The partial checkpoints in ``folder``, oldest first."""
    found = [
        (each.stat().st_mtime_ns, each.name, each)
        for each in folder.glob(f"*{_PARTIAL}")
        if each.is_dir() and not each.is_symlink() and not each.name.startswith(".")
    ]
    return [each for _, _, each in sorted(found)]


def _newest(folder: Path) -> str:
    path = folder / _NEWEST
    try:
        tag = path.read_text(encoding="utf-8").strip()
        _check(tag)
    except FileNotFoundError:
        raise CheckpointError(
            f"There is no checkpoint to go on with in {folder}: it has no file `{_NEWEST}`, which is written when one "
            f"is complete. Name a tag, or another folder. {_present(folder)}"
        ) from None
    except (UnicodeDecodeError, ConfigError):
        raise CheckpointError(f"{path} is damaged: there is no tag in it. Name a tag. {_present(folder)}") from None
    return tag


def _present(folder: Path) -> str:
    partial = [each.name.removesuffix(_PARTIAL) for each in _partial_ones(folder)] if folder.is_dir() else []
    full = sorted(each.name.removeprefix(_CONTENT) for each in folder.glob(f"{_CONTENT}*")) if folder.is_dir() else []
    parts = [f"partial: {', '.join(partial)}"] if partial else []
    parts += [f"full: {', '.join(full)}"] if full else []
    return f"There are, the oldest first, {'; '.join(parts)}." if parts else "There are no others."


def _check(tag: Any) -> None:
    reason = ""
    if not isinstance(tag, str):
        reason = "it is no text"
    elif not tag or tag in (".", "..") or any(character in tag for character in "/\\\0"):
        reason = "it cannot be the name of a file"
    elif tag.startswith("."):
        reason = "names with a dot in front are those of files that are incomplete"
    elif len(tag.encode(errors="replace")) > _LONGEST or not tag.isprintable() or tag != tag.strip():
        reason = f"it is longer than {_LONGEST} bytes, or has characters in it that cannot be seen"
    elif tag == _NEWEST or tag.endswith(_PARTIAL) or tag.startswith(_CONTENT):
        reason = "it is the name of another file in such a folder"
    if reason:
        raise ConfigError(f"The tag of a checkpoint cannot be {tag!r}: {reason}. Take one like `step_100`.")
