"""Model files of a partitioned model, as other libraries write them, without gathering it.

``save_pretrained`` of transformers and PEFT, and ``save_model`` of Accelerate, take or make a whole state dict, edit it
(tied weights, names and layouts on disk, adapters only), split it into files, and write these, the index, and the
configuration. All of that is left to them, on one rank. But the tensors of the state dict are deferred, and the
function that writes a file only notes what belongs there. Afterwards all ranks write the files together
(:mod:`smp_strategy.checkpoint.spread_state`), so names and bytes are those of a single process.

Everything is written beside its place and moved there when it is complete
(:mod:`smp_strategy.engine.saving.saved_models.state_folders`).

[Note: whose folder] Usually all ranks name the same folder, which the first of them writes. A script may give each rank
a folder of its own, so each folder is written by the first rank that names it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, final

import torch.distributed as dist

from smp_strategy.checkpoint.spread_state import PlannedFile, PlannedTensor, SpreadState
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.door_words import door_words
from smp_strategy.distributed.rendezvous import alike, decided_by, meet
from smp_strategy.engine.engine import Engine
from smp_strategy.engine.saving.saved_models import state_folders as folders
from smp_strategy.engine.saving.saved_models.shared_states import on_every_rank
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.deferred_tensor import DeferredTensor
from smp_strategy.model.patching import Patches

__all__ = ["FileNotes", "SpreadModel", "spread_model", "write_together"]


@final
class FileNotes:
    """Files that a library would have written to ``folder``.

    Attributes:
        files: Noted files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files: list[PlannedFile] = []

    @contextmanager
    def instead_of(self, owner: object, name: str) -> Iterator[None]:
        """Context in which the function ``owner.<name>`` of the library, ``save_file`` of safetensors, takes notes."""
        with Patches() as patches:
            patches.put(owner, name, self.note)
            yield

    def note(self, tensors: Mapping[str, Any], filename: Any, metadata: Mapping[str, str] | None = None) -> None:
        """Note a file; the arguments are those of safetensors' ``save_file``."""
        others = [name for name, value in tensors.items() if not isinstance(value, DeferredTensor)]
        if others:
            raise UnsupportedError(
                f"`{others[0]}` is not a weight of the model as it is, but was made when it was saved, and the model "
                f"is spread over ranks. Save by {door_words().save_model} instead."
            )
        noted = {name: PlannedTensor.of(each) for name, each in tensors.items()}
        self.files.append(PlannedFile(str(Path(filename).relative_to(self._folder)), noted, metadata))


@final
class SpreadModel:
    """A partitioned module, or the submodule at ``path``, that is to be saved; its own ``state_dict`` is called in a
    context ``aside``.
    """

    def __init__(self, engine: Engine, path: str, aside: Callable[[], AbstractContextManager[None]]) -> None:
        self._engine = engine
        self._prefix = f"{path}." if path else ""
        self._aside = aside

    def collected(self) -> tuple[SpreadState, dict[str, Any]]:
        """The state of the module, and the whole state dict of the part, with deferred tensors. Collective."""
        with self._aside():
            state = self._engine.saved.spread_state()
        return state, state.deferred(self._prefix)

    def gathered_on_first(self) -> dict[str, Any]:
        """The whole state dict of the part on global rank 0; empty elsewhere. Collective."""
        start = self._prefix
        with self._aside():
            state = self._engine.saved.full_state_dict()
        part = OrderedDict((name.removeprefix(start), value) for name, value in state.items() if name.startswith(start))
        versions: Mapping[str, Any] = getattr(state, "_metadata", {})
        part._metadata = OrderedDict(  # type: ignore[attr-defined]
            (f"{name}.".removeprefix(start).removesuffix("."), value)
            for name, value in versions.items()
            if f"{name}.".startswith(start)
        )
        return part

    def gathered(self) -> dict[str, Any]:
        """The whole state dict of the part, on every rank. Collective."""
        return on_every_rank(self.gathered_on_first())

    @property
    def is_whole_on_first(self) -> bool:
        """Whether global rank 0 has all of the module, and no other rank."""
        return self._engine.saved.is_whole_on_first


def spread_model(engine: Engine, path: str, aside: Callable[[], AbstractContextManager[None]]) -> SpreadModel | None:
    """The module at ``path`` in that of ``engine``, if this rank may lack a part of it; arguments as above.

    Raises:
        UnsupportedError: its weights have no values yet.
    """
    engine.saved.check_values()
    return SpreadModel(engine, path, aside) if engine.is_spread else None


Plan = Callable[[Path, dict[str, Any]], FileNotes]


def write_together(call: str, model: SpreadModel, target: Path | None, plan: Plan, *, replaces: str = "") -> None:
    """Save ``model`` to ``target`` on all ranks. Collective.

    Args:
        target: Folder that this rank names; ``None``: it is not the main process and names none.
        plan: Called on the rank that leads, with an empty folder and the whole state dict: writes the small files to
            the folder and notes the large ones.
        replaces: Pattern of the names of files in ``target`` that are out of date afterwards.
    """
    meet(call)
    named = collectives.gather_objects(None if target is None else str(target.absolute()), "folders to save to")
    state, entries = model.collected()
    for folder in dict.fromkeys(each for each in named if each is not None):
        _write_to(Path(folder), named.index(folder), state, lambda staging: plan(staging, dict(entries)), replaces)


def _write_to(target: Path, leader: int, state: SpreadState, plan: Callable[[Path], FileNotes], replaces: str) -> None:
    rank, doing = dist.get_rank(), f"saving to {target}"
    staging = decided_by(leader, lambda: folders.begin(target), doing)
    with folders.filling(staging, target, is_mine=rank == leader):
        files = decided_by(leader, lambda: plan(staging).files, doing)
        # Without a folder that all machines share, those that see it write.
        sees = collectives.gather_objects(staging.is_dir(), doing)
        state.write(files, staging, writers=[number for number, does in enumerate(sees) if does])
        with alike(f"moving files to {target}"):
            if rank == leader:
                folders.move_in(staging, target, replaces=replaces)
