"""Recognises checkpoint formats, and folders that are wholly a checkpoint and may be replaced.

Reading, verifying and recommending checkpoints all use :func:`kind_of`, so that they agree. Before a folder is
replaced, :func:`reason_to_keep` makes sure that it has no files that a checkpoint does not have, since they would be
deleted. Both look at names and first bytes only; nothing is loaded.
"""

import enum
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from smp_strategy.checkpoint.storage.manifest import FILE_NAME as MANIFEST
from smp_strategy.checkpoint.storage.manifest import FORMAT, Manifest
from smp_strategy.checkpoint.storage.remote_commit import is_commit_object
from smp_strategy.checkpoint.storage.remote_path import AnyPath, RemotePath
from smp_strategy.config.special_paths import special_file
from smp_strategy.errors import CheckpointError, ConfigError

__all__ = [
    "CHECKPOINTS",
    "SHARDED_STATE",
    "CheckpointKind",
    "check_folder",
    "check_replaceable",
    "foreign_entries",
    "has_manifest",
    "kind_of",
    "reason_to_keep",
    "unreadable",
]

# Sharded folder in a folder of Accelerate's.
SHARDED_STATE: Final = "sharded_state"


class CheckpointKind(enum.Enum):
    """Kinds of checkpoints, and of files that are often taken for one. The values are for people."""

    TORCH_FILE = "PyTorch file"
    SAFETENSORS = "safetensors file"
    SHARDED = "sharded checkpoint"
    STATE = "folder of Accelerate's save_state"
    SAGEMAKER = "files of SageMaker's library"
    TAGGED = "folder of checkpoints with tags"
    WEIGHTS = "folder with weights, as Hugging Face has them"
    DEEPSPEED = "checkpoint of DeepSpeed"
    FSDP_STATE = "folder of Accelerate with FSDP"
    MEGATRON = "checkpoint of Megatron"
    TORCHSCRIPT = "TorchScript program"
    GGUF = "GGUF file"
    ZIP = "zip archive, but not one that torch.save has written"
    EMPTY = "empty"
    OTHER = "no checkpoint of a known kind"


_REMEDIES: Final = {
    CheckpointKind.DEEPSPEED: "Make one file of it by the `zero_to_fp32.py` that is in it, and give that",
    CheckpointKind.FSDP_STATE: "Give the folder `pytorch_model_fsdp_0` in it, or the file `pytorch_model_fsdp.bin`",
    CheckpointKind.MEGATRON: "Make a Hugging Face folder of it, by Megatron's own tools, and give that",
    CheckpointKind.TORCHSCRIPT: "Save its `state_dict()` by `torch.save`, and give that",
    CheckpointKind.GGUF: "Give the safetensors that it was made of",
    CheckpointKind.ZIP: "Give the file that is in it, if it has one",
    CheckpointKind.EMPTY: "It may be left of a save that was interrupted: give another one",
}

# Kinds that can be read.
CHECKPOINTS: Final = tuple(
    kind for kind in CheckpointKind if kind not in _REMEDIES and kind is not CheckpointKind.OTHER
)
_NUMBERED: Final = r"(-\d{5}-of-\d{5}|_\d+)?"
_WEIGHTS: Final = rf"(model|pytorch_model){_NUMBERED}\.(safetensors|bin)(\.index\.json)?"
# Files that Hugging Face puts beside weights; none that people write themselves (README.md, train.py).
_BESIDE_WEIGHTS: Final = (
    r"config\.json|generation_config\.json|.*tokenizer.*\.(json|model)|vocab\.(json|txt)|merges\.txt|"
    r"special_tokens_map\.json|added_tokens\.json|(pre|video_pre)?processor_config\.json|chat_template\.(json|jinja)|"
    r"spiece\.model|sentencepiece.*\.model|.*\.tiktoken|.*\.bpe\.codes|"
    r"(modeling|configuration|tokenization|image_processing|processing|feature_extraction)_\w+\.py"
)
# Files of a folder by its kind; a folder of another kind is never replaced.
_PARTS: Final = {
    CheckpointKind.SHARDED: r"\.metadata|.*__\d+_\d+\.distcp|meta\.pt",
    CheckpointKind.WEIGHTS: rf"{_WEIGHTS}|{_BESIDE_WEIGHTS}",
    CheckpointKind.STATE: (
        rf"{_WEIGHTS}|(optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.bin|scaler\.pt|random_states_\d+\.pkl|"
        r"custom_checkpoint_\d+\.pkl|smp_strategy\.bin"
    ),
    CheckpointKind.SAGEMAKER: r"(model|optimizer)(_\d+){1,3}\.pt|user_content\.pt|fp32_states(_\d+){1,3}\.pt",
}
# Files of nobody: NFS's for deleted files that are still open, and a file manager's.
_NOBODYS: Final = r"\.nfs[0-9a-f]+|\.DS_Store"
_DEEPSPEED: Final = (
    r"zero_to_fp32\.py|mp_rank_\d+_model_states\.pt|(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt"
    r"|zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt|global_step\d+"
)
_OLD_TORCH: Final = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_MOST_NAMED: Final = 5


def kind_of(path: AnyPath) -> CheckpointKind:
    """The kind of ``path``, which must exist; links are followed."""
    return _kind_of_folder(path) if path.is_dir() else _kind_of_file(path)


def unreadable(path: AnyPath, kind: CheckpointKind) -> str | None:
    """The reason why a kind cannot be read as a checkpoint, with a remedy; ``None``: it can, or the kind is not
    known."""
    if isinstance(path, RemotePath) and kind is not CheckpointKind.SHARDED:
        return f"{path} is a {kind.value}: only sharded checkpoints are read at an address. Copy it, and give the copy."
    if kind not in _REMEDIES:
        return None
    article = "is" if kind is CheckpointKind.EMPTY else "is a"
    return f"{path} {article} {kind.value}, which cannot be read as a checkpoint. {_REMEDIES[kind]}."


def foreign_entries(folder: Path) -> list[str]:
    """Entries of a folder that are no part of a checkpoint; all of them, if it has none that may be replaced."""
    names = [name for name in _entries(folder) if not re.fullmatch(_NOBODYS, name)]
    listed, is_ours = _listed(folder)
    kind = _kind_of_folder(folder)
    if kind not in _PARTS:
        return names
    foreign: list[str] = []
    for name in names:
        each = folder / name
        if each.is_dir() and not each.is_symlink():
            if name == SHARDED_STATE and kind is CheckpointKind.STATE:
                foreign += [f"{name}/{inner}" for inner in foreign_entries(each)]
            else:
                foreign.append(name)
        else:
            is_listed = name in listed or (is_ours and name == MANIFEST)
            if special_file(each) or not (is_listed or re.fullmatch(_PARTS[kind], name)):
                foreign.append(name)
    return foreign


def reason_to_keep(target: AnyPath, *, is_kept: Callable[[str], bool] = lambda name: False) -> str | None:
    """The reason why a checkpoint must not replace ``target``; ``None``: it may.

    A link to a file may be replaced, since its target stays, and a file, since it is named. A folder would go with all
    that is in it.

    Args:
        target: Path that may exist.
        is_kept: Whether an entry that no checkpoint has is in the new folder as well.
    """
    if isinstance(target, RemotePath):
        return None if target.is_file() or not target.is_dir() else "there are objects below that address"
    if kind := special_file(target):
        return f"it is {kind}"
    if target.is_symlink() or not target.is_dir():
        return None
    if os.path.ismount(target):
        return "it is a folder at which a file system is mounted"
    if Path.cwd().is_relative_to(target.resolve()):
        return "it is, or has in it, the folder in which this program works"
    if foreign := [name for name in foreign_entries(target) if not is_kept(name)]:
        more = f" and {len(foreign) - _MOST_NAMED} more" if len(foreign) > _MOST_NAMED else ""
        return f"it is a folder with other things than a checkpoint in it: {', '.join(foreign[:_MOST_NAMED])}{more}"
    return None


def check_folder(folder: Path) -> None:
    """Refuse a folder to write to that is, or is below, a file, a device, a FIFO or a socket.

    Raises:
        ConfigError: it cannot be made.
    """
    for each in (folder, *folder.parents):
        if each.exists() and not each.is_dir():
            kind = special_file(each) or "a file"
            raise ConfigError(f"{each} is {kind}, but a folder is to be written. Name another one.")


def check_replaceable(target: AnyPath) -> None:
    """Refuse to replace a folder that is not wholly a checkpoint, a device, a FIFO or a socket.

    Raises:
        CheckpointError: it must stay.
    """
    if reason := reason_to_keep(target):
        raise CheckpointError(f"{target} is not replaced: {reason}. Give another name, or move that away.")


def has_manifest(folder: AnyPath) -> bool:
    """Whether a folder has digests of ours, damaged ones included; other programs write files of that name, too."""
    is_there = (folder / MANIFEST).is_file()
    return is_there and (_kind_of_folder(folder) is not CheckpointKind.WEIGHTS or _listed(folder)[1])


def _entries(folder: AnyPath) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def _listed(folder: AnyPath) -> tuple[set[str], bool]:
    """File names in a manifest of ours, and whether there is a manifest of ours."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except OSError:
        return set(), False
    try:
        return set(Manifest.from_bytes(data).files), True
    except CheckpointError:  # damaged
        return set(), FORMAT.encode() in data[:100]


def _kind_of_folder(folder: AnyPath) -> CheckpointKind:
    names = _entries(folder)
    if not names:
        return CheckpointKind.EMPTY
    return next(_matching(folder, names), CheckpointKind.OTHER)


def _matching(folder: AnyPath, names: list[str]) -> Iterator[CheckpointKind]:
    def has(pattern: str) -> bool:
        return any(re.fullmatch(pattern, name) for name in names)

    listed, is_ours = _listed(folder)
    if ".metadata" in names or has(r".*__\d+_\d+\.distcp"):
        yield CheckpointKind.SHARDED
    if has(r"pytorch_model_fsdp(_\d+)?(\.bin)?"):
        yield CheckpointKind.FSDP_STATE
    if SHARDED_STATE in names or has(r"random_states_\d+\.pkl") or (has(_WEIGHTS) and has(r"optimizer(_\d+)?\.bin")):
        yield CheckpointKind.STATE
    if has(r"model(_\d+){1,3}\.pt"):
        yield CheckpointKind.SAGEMAKER
    if "newest" in names:
        yield CheckpointKind.TAGGED
    inside = _entries(folder / "checkpoint") if (folder / "checkpoint").is_dir() else []
    if has(_DEEPSPEED) or any(re.fullmatch(_DEEPSPEED, name) for name in inside):
        yield CheckpointKind.DEEPSPEED
    if "latest_checkpointed_iteration.txt" in names or has(r"mp_rank_\d+(_\d+)?"):
        yield CheckpointKind.MEGATRON
    if has(_WEIGHTS) or has(r".*\.safetensors"):
        yield CheckpointKind.WEIGHTS
    if is_ours:
        yield CheckpointKind.SHARDED if "meta.pt" in listed else CheckpointKind.STATE


def _kind_of_file(file: AnyPath) -> CheckpointKind:
    if isinstance(file, Path) and special_file(file):  # a read of a FIFO waits for a writer
        return CheckpointKind.OTHER
    with file.open("rb") as opened:
        start = opened.read(1024)
        size = opened.seek(0, os.SEEK_END)
    if not start:
        return CheckpointKind.EMPTY
    if is_commit_object(start):
        return CheckpointKind.SHARDED
    if start.startswith(b"PK"):
        return _kind_of_archive(file, start)
    if start.startswith(_OLD_TORCH):
        return CheckpointKind.TORCH_FILE
    if start.startswith(b"GGUF"):
        return CheckpointKind.GGUF
    is_header = start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= size - 8
    return CheckpointKind.SAFETENSORS if is_header else CheckpointKind.OTHER


def _kind_of_archive(file: AnyPath, start: bytes) -> CheckpointKind:
    """Kind of a zip archive. The table of a damaged one, which is at the end, may be missing or wrong: the first record
    tells, too."""
    length = int.from_bytes(start[26:28], "little")
    names = [start[30 : 30 + length].decode(errors="replace")]
    with suppress(zipfile.BadZipFile, OSError, ValueError, NotImplementedError), file.open("rb") as opened:
        names += zipfile.ZipFile(opened).namelist()
    records = {name.partition("/")[2] for name in names}
    if "data.pkl" not in records:
        return CheckpointKind.ZIP
    return CheckpointKind.TORCHSCRIPT if "constants.pkl" in records else CheckpointKind.TORCH_FILE
