"""Reads checkpoints of SageMaker's model parallel library: one file per rank.

``model_{pp}_{tp}.pt`` has the weights of pipeline rank ``pp`` and tensor-parallel rank ``tp``, and
``optimizer_{pp}_{tp}.pt`` their optimizer state (a third number is that of a replica that has a share of the state).
Sharded data parallelism writes one ``model_0.pt`` instead, whose parameters are empty, and ``optimizer_{rank}.pt`` with
float32 values in flat groups.

Each of ``s`` files with flat groups has ``ceil(numel / s)`` elements of every parameter, one parameter behind the
other; the last elements of the last file may be padding. Names and shapes are in ``user_content.pt``::

    param_shapes  a [5]  b [2]             file 0   a0 a1 a2  b0
                                           file 1   a3 a4 __  b1

Joins the parts of tensors that tensor-parallel ranks have written.

A part does not tell the shape of the whole tensor. So whole shapes come from a checkpoint of the same model or a folder
of Hugging Face, and tell the dimension along which parts were cut::

    parts [8, 32] and [8, 32], whole [16, 32]     one below the other
    parts [8, 32] and [8, 32], whole [8, 32]      the same tensor twice
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from smp_strategy.checkpoint.convert.contents import CheckpointContents, LazyTensor, OptimizerContents
from smp_strategy.checkpoint.convert.layouts import contents_of, parameter_shapes, read_optimizer
from smp_strategy.checkpoint.convert.readers import read_dict
from smp_strategy.errors import CheckpointError

__all__ = ["flat_weights", "open_sagemaker", "shapes_in", "cut_dim", "join_parts", "union"]


Shape = tuple[int, ...]


def cut_dim(parts: Sequence[Shape], whole: Shape) -> int | None:
    """Dimension along which tensors of the shapes ``parts`` join to ``whole``; ``None``: each is whole.

    Raises:
        ValueError: they do not.
    """
    if all(part == whole for part in parts):
        return None
    for dim, size in enumerate(whole):
        rest = whole[:dim] + whole[dim + 1 :]
        if all(len(part) == len(whole) and part[:dim] + part[dim + 1 :] == rest for part in parts) and (
            sum(part[dim] for part in parts) == size
        ):
            return dim
    raise ValueError(f"{', '.join(str(list(part)) for part in parts)} do not make {list(whole)}.")


def join_parts(
    parts: Sequence[Mapping[str, LazyTensor]], like: Mapping[str, Shape] | None, source: str
) -> dict[str, LazyTensor]:
    """Join the weights of tensor-parallel ranks.

    Args:
        parts: Weights of each rank, in their order.
        like: Whole shapes; ``None``: not known, so all ranks must have the same.
        source: Name of the checkpoint for messages.

    Raises:
        CheckpointError: parts are lacking, do not fit, or should be alike and are not.
    """
    names = dict.fromkeys(name for part in parts for name in part)
    whole = {}
    for name in names:
        found = [part[name] for part in parts if name in part]
        if len(found) != len(parts):
            raise CheckpointError(f"{source} has `{name}` of {len(found)} tensor parallel ranks, not of {len(parts)}.")
        whole[name] = found[0] if len(parts) == 1 else _join(name, found, like, source)
    return whole


def _join(name: str, parts: list[LazyTensor], like: Mapping[str, Shape] | None, source: str) -> LazyTensor:
    if like is None:
        if any(part.shape != parts[0].shape for part in parts) or not _are_equal(parts):
            raise CheckpointError(
                f"{source} has another `{name}` for each tensor parallel rank, so these are parts of it, and they do "
                "not tell how it was cut. Give the whole shapes: `--like` and a checkpoint, or a directory of Hugging "
                "Face, of the same model."
            )
        return parts[0]
    if name not in like:
        raise CheckpointError(f"{source} has `{name}`, which is not in what `--like` gives. Is that of another model?")
    try:
        dim = cut_dim([part.shape for part in parts], like[name])
    except ValueError as error:
        raise CheckpointError(f"{source}: the parts of `{name}` do not fit what `--like` gives: {error}") from error
    if dim is not None:
        return LazyTensor(like[name], parts[0].dtype, partial(_cat, parts, dim))
    if not _are_equal(parts):
        raise CheckpointError(
            f"{source} has `{name}` as a whole of each tensor parallel rank, and they differ. Which is right cannot be "
            "told."
        )
    return parts[0]


def _cat(parts: Sequence[LazyTensor], dim: int) -> Tensor:
    return torch.cat([part.read() for part in parts], dim)


def _are_equal(parts: Sequence[LazyTensor]) -> bool:
    first = parts[0].read()
    return all(part.dtype == first.dtype and torch.equal(first, part.read()) for part in parts[1:])


def union(parts: Sequence[Mapping[str, LazyTensor]], source: str) -> dict[str, LazyTensor]:
    """Weights of all stages; tensors that several stages have, such as tied weights, must be alike.

    Raises:
        CheckpointError: they are not.
    """
    found: dict[str, LazyTensor] = {}
    for part in parts:
        for name, tensor in part.items():
            first = found.setdefault(name, tensor)
            if first is not tensor and (first.shape != tensor.shape or not _are_equal([first, tensor])):
                raise CheckpointError(f"{source} has two different tensors for `{name}`, of two pipeline ranks.")
    return found


def shapes_in(param_shapes: Any, source: str) -> dict[str, tuple[int, ...]]:
    """Shapes of parameters, from a dict, or a list of dicts, one per group of the optimizer.

    Raises:
        CheckpointError: it is neither.
    """
    groups = param_shapes if isinstance(param_shapes, list | tuple) else [param_shapes]
    try:
        return {str(name): tuple(map(int, shape)) for group in groups for name, shape in group.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{source}: `param_shapes` is not names and shapes, but {param_shapes!r:.100}."
        ) from error


def flat_weights(groups: Sequence[Any], shapes: Mapping[str, tuple[int, ...]], source: str) -> dict[str, LazyTensor]:
    """Parameters from the flat groups of all files.

    Args:
        groups: ``fp32_flat_groups`` of each file: a tensor, or a list of them.
        shapes: Shapes of all parameters, in the order of the flat groups.
        source: Name of the checkpoint for messages.

    Raises:
        CheckpointError: there are more or fewer elements than parameters have.
    """
    pieces = [_joined(group, source) for group in groups]
    num_files, offset = len(pieces), 0
    found: dict[str, LazyTensor] = {}
    for name, shape in shapes.items():
        length = -(-math.prod(shape) // num_files)
        found[name] = LazyTensor(shape, torch.float32, partial(_read, pieces, offset, length, shape))
        offset += length
    for number, piece in enumerate(pieces):
        if piece.numel() != offset:
            raise CheckpointError(
                f"{source}: `fp32_flat_groups` of optimizer file {number} has {piece.numel()} elements, but "
                f"`param_shapes` with {num_files} files makes it {offset}. A file may be lacking, or be of another run."
            )
    return found


def _joined(group: Any, source: str) -> Tensor:
    flat = [group] if isinstance(group, LazyTensor) else group
    if not isinstance(flat, list | tuple) or not all(isinstance(tensor, LazyTensor) for tensor in flat):
        raise CheckpointError(f"{source}: `fp32_flat_groups` is no list of tensors.")
    values = [tensor.read().reshape(-1).float() for tensor in flat]
    return values[0] if len(values) == 1 else torch.cat(values or [torch.empty(0)])


def _read(pieces: Sequence[Tensor], offset: int, length: int, shape: tuple[int, ...]) -> Tensor:
    values = torch.cat([piece.narrow(0, offset, length) for piece in pieces])
    return values[: math.prod(shape)].view(shape)


_NAME = re.compile(r"(model|optimizer)_(\d+(?:_\d+){0,2})\.pt")
RankIndices = tuple[int, ...]
"""Numbers in the name of a file: ``model_1_0.pt`` is of pipeline rank 1 and tensor-parallel rank 0."""


def open_sagemaker(path: Path, *, like: Mapping[str, Shape] | None = None) -> CheckpointContents:
    """Open the files of all ranks as one checkpoint.

    Args:
        path: Folder.
        like: Whole shapes of the weights, needed where layers were split.

    Raises:
        CheckpointError: files are lacking, damaged or do not fit each other.
    """
    files = _files(path)
    if set(files["model"]) == {(0,)} and files["optimizer"]:
        return _open_sharded(path, files["optimizer"])
    models = {indices: _open_model(file) for indices, file in files["model"].items()}
    ranks = _grid(path, models)
    replicas = {indices[:2] for indices in models}
    parts = {(pp, tp): models[next(p for p in models if p[:2] == (pp, tp))] for pp, tp in replicas}
    stages, splits = ranks
    weights = join_parts(
        [union([parts[pp, tp].weight_tensors() for pp in stages], str(path)) for tp in splits], like, str(path)
    )
    extra = {
        name: value
        for part in parts.values()
        for name, value in part.weights.items()
        if not isinstance(value, LazyTensor)
    }
    found = CheckpointContents(kind="files of SageMaker's library", weights={**weights, **extra})
    if (path / "user_content.pt").exists():
        found.remarks.append("user_content.pt was left out: it is the script's own.")
    _add_optimizer(found, files["optimizer"], models, ranks, like, path)
    return found


def _files(path: Path) -> dict[str, dict[RankIndices, Path]]:
    found: dict[str, dict[RankIndices, Path]] = {"model": {}, "optimizer": {}}
    for file in sorted(path.glob("*.pt")):
        if match := _NAME.fullmatch(file.name):
            found[match[1]][tuple(map(int, match[2].split("_")))] = file
    return found


def _open_model(file: Path) -> CheckpointContents:
    tree = read_dict(file)
    tree.pop("_smp_is_partial", None)
    return contents_of(tree, kind="", source=str(file)) if tree else CheckpointContents(kind="", weights={})


def _grid(path: Path, models: Mapping[RankIndices, Any]) -> tuple[list[int], list[int]]:
    """Pipeline ranks and tensor-parallel ranks; each pair must have a file."""
    if any(len(indices) < 2 for indices in models):
        raise CheckpointError(f"{path} has model files with one number and no optimizer files with flat groups.")
    stages, splits = (sorted({indices[axis] for indices in models}) for axis in (0, 1))
    lacking = [f"model_{pp}_{tp}.pt" for pp in range(stages[-1] + 1) for tp in range(splits[-1] + 1)
               if not any(indices[:2] == (pp, tp) for indices in models)]  # fmt: skip
    if lacking:
        raise CheckpointError(f"{path} is not complete: {', '.join(lacking)} is lacking.")
    return stages, splits


# --- optimizers -------------------------------------------------------------------------------------------------------


@final
class _NotTold(Exception):
    """The state of the optimizer cannot be read, for this reason."""


def _add_optimizer(
    found: CheckpointContents,
    files: Mapping[RankIndices, Path],
    models: Mapping[RankIndices, CheckpointContents],
    ranks: tuple[list[int], list[int]],
    like: Mapping[str, Shape] | None,
    path: Path,
) -> None:
    if not files:
        return
    stages, splits = ranks
    try:
        parts = {indices: _open_optimizer(file, indices, models) for indices, file in files.items()}
        columns = []
        for tp in splits:
            column = [part for (pp, own, *_), part in sorted(parts.items()) if own == tp]
            if {pp for pp, own, *_ in parts if own == tp} != set(stages):
                raise _NotTold("files of some ranks are lacking.")
            columns.append(_together(column))
        found.optimizers.append(_join_columns(columns, like, str(path)))
    except _NotTold as reason:
        found.remarks.append(f"The state of the optimizer was left out: {reason}")


def _open_optimizer(
    file: Path, indices: RankIndices, models: Mapping[RankIndices, CheckpointContents]
) -> OptimizerContents:
    tree = read_dict(file)
    if not {"state", "param_groups"} <= tree.keys():
        raise _NotTold(f"{file.name} has no `state` and `param_groups`.")
    model = next((models[other] for other in (indices, indices[:2]) if other in models), None)
    if model is None:
        raise _NotTold(f"there is no model file for {file.name}.")
    remarks: list[str] = []
    optimizer = read_optimizer(tree, parameter_shapes(model.weights), file.name, remarks)
    if optimizer is None:
        raise _NotTold(" ".join(remarks))
    return optimizer


def _together(parts: Sequence[OptimizerContents]) -> OptimizerContents:
    """Merge optimizer state of stages, which have their own parameters each, and of replicas, which have shares of the
    state."""
    state: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = [{**group, "params": []} for group in parts[0].groups]
    for part in parts:
        state.update(part.state)
        if len(part.groups) != len(groups):
            raise _NotTold("ranks have different numbers of groups.")
        for group, own in zip(groups, part.groups, strict=True):
            group.pop("param_names", None)
            group["params"] = list(dict.fromkeys([*group["params"], *own["params"]]))
    return OptimizerContents(state, groups)


def _join_columns(
    columns: Sequence[OptimizerContents], like: Mapping[str, Shape] | None, source: str
) -> OptimizerContents:
    if len(columns) == 1:
        return columns[0]
    flat = [
        {f"{name}\0{key}": value for name, kept in column.state.items() for key, value in kept.items()}
        for column in columns
    ]
    tensors = [{key: value for key, value in part.items() if isinstance(value, LazyTensor)} for part in flat]
    shapes: dict[str, Shape] | None = None
    if like is not None:
        # Scalars (Adam's `step`) are not split; all other state is split like the parameter.
        shapes = {
            key: like.get(key.partition("\0")[0], value.shape) if value.shape else ()
            for key, value in tensors[0].items()
        }
    joined: dict[str, Any] = {**flat[0], **join_parts(tensors, shapes, source)}
    state: dict[str, dict[str, Any]] = {}
    for key, value in joined.items():
        name, _, entry = key.partition("\0")
        state.setdefault(name, {})[entry] = value
    return OptimizerContents(state, columns[0].groups)


# --- sharded data parallelism -----------------------------------------------------------------------------------------


def _open_sharded(path: Path, optimizers: Mapping[RankIndices, Path]) -> CheckpointContents:
    user_content = path / "user_content.pt"
    content = read_dict(user_content) if user_content.is_file() else {}
    if "param_shapes" not in content:
        raise CheckpointError(
            f"{path} has weights in flat groups, for which user_content.pt must have `param_shapes` (and "
            "`buffer_names`), but it is lacking, or has none."
        )
    numbers = sorted(indices[0] for indices in optimizers)
    loaded = [read_dict(optimizers[indices]) for indices in sorted(optimizers)]
    states: list[Any] = [state.get("optimizer_state_dict", state) for state in loaded]
    count = states[0].get("partition_count", len(numbers))
    count = max(count) if isinstance(count, list | tuple) and count else count
    if (
        numbers != list(range(len(numbers)))
        or any(len(indices) != 1 for indices in optimizers)
        or count != len(numbers)
    ):
        raise CheckpointError(
            f"{path} is not complete: {count} optimizer files are needed, there are those of ranks {numbers}."
        )
    lacking = [str(number) for number, state in enumerate(states) if "fp32_flat_groups" not in state]
    if lacking:
        raise CheckpointError(f"{path}: no `fp32_flat_groups` in the optimizer files of ranks {', '.join(lacking)}.")
    shapes = shapes_in(content["param_shapes"], str(user_content))
    weights: dict[str, Any] = dict(flat_weights([state["fp32_flat_groups"] for state in states], shapes, str(path)))
    tree = read_dict(path / "model_0.pt")
    module: Any = tree.get("module", tree)
    for name in content.get("buffer_names", ()):
        if not isinstance(module, Mapping) or not isinstance(module.get(name), LazyTensor):
            raise CheckpointError(f"{path / 'model_0.pt'} lacks the buffer `{name}`.")
        weights[name] = module[name]
    found = CheckpointContents(kind="files of SageMaker's library, sharded data parallelism", weights=weights)
    found.remarks.append("The state of the optimizer was left out: it is flat, and only weights have names there.")
    return found
