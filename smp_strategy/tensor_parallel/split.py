"""``split_layers``: splits layers of a module in place, and makes them whole again.

All ranks decide from the same module what is split and how, before anything is changed
(:mod:`smp_strategy.tensor_parallel.plan.resolve`), and compare their decisions: ranks that split differently would wait
for each other for ever. A layer may still refuse when it is split (because of a ``forward`` of its own, say). Then all
split layers are made whole, and the decision is repeated without its block.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from smp_strategy.distributed.agreement.topics import SPLIT_LAYERS
from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.errors import ConfigError
from smp_strategy.model.padded_encoder import zero_padding_of
from smp_strategy.model.parameter_parts import ParameterParts
from smp_strategy.model.shard_layout import Cut
from smp_strategy.tensor_parallel.layers.base import AmongParts, CannotSplit
from smp_strategy.tensor_parallel.layers.embedding import (
    HiddenParallelEmbedding,
    ScaledVocabParallelEmbedding,
    SomeHeads,
    VocabParallelEmbedding,
    is_scaled_embedding,
)
from smp_strategy.tensor_parallel.layers.linear import (
    ColumnParallelConv,
    ColumnParallelLinear,
    RowParallelConv,
    RowParallelLinear,
    VocabParallelHead,
)
from smp_strategy.tensor_parallel.plan import user_choices
from smp_strategy.tensor_parallel.plan.hugging_face import family_blocks, is_from_transformers, vocabulary_blocks
from smp_strategy.tensor_parallel.plan.observed_pairs import ObservedLayers, pair_blocks, watch
from smp_strategy.tensor_parallel.plan.plan import LayerBlock, LayerLine, SplitKind, SplitReport, describe
from smp_strategy.tensor_parallel.plan.registry import registered_blocks
from smp_strategy.tensor_parallel.plan.resolve import SplitDecision, choose
from smp_strategy.tensor_parallel.plan.torch_layers import torch_blocks
from smp_strategy.tensor_parallel.region_rng import RegionRng
from smp_strategy.tensor_parallel.sequence_parallel import SequenceParallel, chains
from smp_strategy.tensor_parallel.split_module import SplitModule, UnsplitViews

__all__ = ["split_layers"]


def split_layers(
    module: nn.Module,
    group: TensorGroup,
    *,
    patterns: Mapping[str, str] | None = None,
    strict: bool = False,
    stream_dim: int | None = None,
    run_step: Callable[[], Any] | None = None,
    before: ObservedLayers | None = None,
) -> SplitModule:
    """Split layers of ``module`` over the ranks of ``group``, in place. Collective, with the same module on all ranks.

    Args:
        module: The whole module, with the same values on all ranks.
        group: Ranks that get the parts.
        patterns: Styles by name pattern, from the user; they take precedence over everything known of the model.
        strict: Raise if a layer stays whole that the user has not excluded.
        stream_dim: Dim along which activations between transformer blocks are split as well: 0 for samples, 1 for
            tokens; ``None``: they are not.
        run_step: Computes the loss once, to observe pairs of linear layers and the readers of weights; ``None``: no
            pairs are looked for, and layers are trusted to be the only readers of their weights.
        before: Observations from when the module was split before; its pairs are split again, whatever ``run_step``
            is.

    Raises:
        ConfigError: A pattern matches nothing, its style is unknown, or its layer cannot be split; layers stay
            whole under ``strict``; ranks decide differently.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    watched = ObservedLayers() if run_step is None or group.size == 1 else watch(modules, run_step)
    watched = watched if before is None else watched.after(before)
    blocks = [] if group.size == 1 else list(_blocks(modules, patterns or {}, watched))
    refused: dict[str, str] = {}
    while True:
        choice = choose(modules, blocks, group.size, user_choices.disabled(modules), refused, watched.readers)
        report = SplitReport(tuple(_lines(modules, choice)), group.size)
        _refuse(choice, report, group, strict)
        undo: list[Callable[[], object]] = []
        appearance = UnsplitViews(dict.fromkeys(modules.values()))
        encoders = {each for each in modules.values() if getattr(each, "use_nested_tensor", False)}
        failed = _split_all(choice, modules, group, undo)
        if failed is None:
            if encoders and choice.blocks:
                undo.append(zero_padding_of(encoders.__contains__))
            if stream_dim is not None:
                streams = chains(module)
                undo += [SequenceParallel(layers, group, dim=stream_dim).remove for layers in streams.values()]
                report = replace(report, streams=tuple(streams), stream_dim=stream_dim)
            appearance.compare()
            return SplitModule(ParameterParts(_cuts(module), group), report, appearance, watched, choice.blocks, undo)
        # A refusal may leave out bonded and tied blocks as well, so everything is decided again.
        while undo:
            undo.pop()()
        refused |= failed


def _blocks(
    modules: Mapping[str, nn.Module],
    patterns: Mapping[str, str],
    watched: ObservedLayers,
) -> Iterator[LayerBlock]:
    """Blocks of all sources, in order of precedence."""
    into = {column: pair.row for pair in watched.pairs for column in pair.columns}
    yield from user_choices.pattern_blocks(modules, patterns, lambda column, row: into.get(column) == row)
    yield from registered_blocks(modules)
    yield from vocabulary_blocks(modules)
    yield from family_blocks(modules)
    yield from torch_blocks(modules)
    yield from pair_blocks(modules, watched.pairs)


def _refuse(choice: SplitDecision, report: SplitReport, group: TensorGroup, strict: bool) -> None:
    """Raise errors before anything is split."""
    problems = [
        f"`tensor_parallel` names `{name}`, which cannot be split: {reason}."
        for name, (source, reason) in choice.reasons.items()
        if source == user_choices.SOURCE
    ]
    if strict and group.size > 1:
        problems += [
            f"`{line.name}` ({line.kind}) is not split, but `tensor_parallel_strict` is set: {line.why}. Name it in "
            "`tensor_parallel`: `replicate` if it is to stay whole."
            for line in report.skipped
        ]
    if problems:
        raise ConfigError(problems)
    if not group.sends(torch.empty(0)):
        return
    group.compare(SPLIT_LAYERS, [(line.name, line.how) for line in report.lines])


def _split_all(
    choice: SplitDecision, modules: Mapping[str, nn.Module], group: TensorGroup, undo: list[Callable[[], object]]
) -> dict[str, str] | None:
    """Split the chosen blocks; returns the block that refuses, with its reason."""
    for block in choice.blocks:
        try:
            _split_block(block, modules, group, undo)
        except CannotSplit as reason:
            return {block.name: str(reason)}
    return None


def _split_block(
    block: LayerBlock, modules: Mapping[str, nn.Module], group: TensorGroup, undo: list[Callable[[], object]]
) -> None:
    inner = [how.style for how in block.layers.values() if not how.is_whole_outside]
    is_region = "column" in inner and "row" in inner
    randomness = RegionRng(group) if is_region else None
    shares_input = inner.count("column") > 1
    for name, how in block.layers.items():
        layer = modules[name]
        try:
            _split_layer(layer, how, group, randomness, shares_input=shares_input)
        except CannotSplit as reason:
            raise CannotSplit(f"`{name}`: {reason}") from None
        if how.style != "whole":
            undo.append(layer.to_dense)  # type: ignore[arg-type]
    if block.attention is not None:
        name, weights_at = block.attention
        SomeHeads.from_dense(modules[name], group, {}, weights_at)
        undo.append(modules[name].to_dense)  # type: ignore[arg-type]
    for owner, attribute in block.divided:
        whole = getattr(modules[owner], attribute)
        _set(modules[owner], attribute, whole // group.size, undo)
    for owner, attribute, value in block.replaced:
        _set(modules[owner], attribute, value, undo)


def _set(module: nn.Module, attribute: str, value: Any, undo: list[Callable[[], object]]) -> None:
    before = getattr(module, attribute)
    setattr(module, attribute, value)
    undo.append(lambda: setattr(module, attribute, before))


def _split_layer(
    layer: nn.Module, how: SplitKind, group: TensorGroup, randomness: RegionRng | None, *, shares_input: bool
) -> None:
    if how.style in ("column", "row"):
        _split_features(layer, how, group, randomness, shares_input=shares_input)
    elif how.style == "vocab":
        kind = ScaledVocabParallelEmbedding if is_scaled_embedding(layer) else VocabParallelEmbedding
        kind.from_dense(layer, group)
    elif how.style == "logits":
        VocabParallelHead.from_dense(layer, group)
    elif how.style == "embedding":
        HiddenParallelEmbedding.from_dense(layer, group, gather_output=how.is_whole_outside)
    elif how.style == "inside":
        AmongParts.from_dense(layer, group)
    elif how.style == "layer":
        assert how.split_by is not None
        how.split_by(layer, group)


def _split_features(
    layer: nn.Module, how: SplitKind, group: TensorGroup, randomness: RegionRng | None, *, shares_input: bool
) -> None:
    is_conv = isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    blocks: dict[str, Any] = {} if is_conv else {"num_blocks": how.num_blocks}
    if how.style == "column":
        if how.looks_whole:
            blocks["looks_whole"] = True
        column = ColumnParallelConv if is_conv else ColumnParallelLinear
        column.from_dense(
            layer,
            group,
            **blocks,
            granule=how.granule,
            gather_output=how.is_whole_outside,
            shares_input=shares_input and not how.is_whole_outside,
            randomness=randomness,
        )
    else:
        row = RowParallelConv if is_conv else RowParallelLinear
        splits_input = how.is_whole_outside or how.looks_whole
        row.from_dense(layer, group, **blocks, granule=how.granule, splits_input=splits_input, randomness=randomness)


def _cuts(module: nn.Module) -> dict[nn.Parameter, Cut]:
    return {
        part.get_parameter(name): cut
        for part in module.modules()
        for name, cut in getattr(part, "cuts", {}).items()
        if name in dict(part.named_parameters(remove_duplicate=False))
    }


def _lines(modules: Mapping[str, nn.Module], choice: SplitDecision) -> Iterator[LayerLine]:
    seen: set[int] = set()
    inside: dict[str, LayerLine] = {}
    for name, module in modules.items():
        has_own = next(module.parameters(recurse=False), None) is not None
        found = choice.of(name)
        if id(module) in seen or not (has_own or found is not None):
            continue
        seen.add(id(module))
        if any(name.startswith(f"{outer}.") for outer in inside):
            continue
        kind = type(module).__name__
        if found is not None:
            block, how = found
            line = LayerLine(
                name,
                kind,
                describe(how),
                block.source,
                how.style not in ("whole", "inside"),
                is_asked=how.style == "whole" and block.source == user_choices.SOURCE,
            )
            if how.style == "layer":
                inside[name] = line
            yield line
        elif name in choice.reasons:
            source, reason = choice.reasons[name]
            yield LayerLine(name, kind, "whole", reason if source in reason else f"{reason} ({source})", False, True)
        else:
            yield _whole_line(name, module, modules)


def _whole_line(name: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> LayerLine:
    kind = type(module).__name__
    if (reason := user_choices.disabled(modules).get(name)) is not None:
        return LayerLine(name, kind, "whole", reason, False, is_asked=True)
    if all(parameter.ndim < 2 for parameter in module.parameters(recurse=False)):
        return LayerLine(name, kind, "whole", "has vectors only", False)
    if isinstance(module, nn.Embedding) and any(
        is_from_transformers(outer) for at, outer in modules.items() if not at or name.startswith(f"{at}.")
    ):
        return LayerLine(name, kind, "whole", "a table of positions or types", False)
    return LayerLine(name, kind, "whole", "nothing says how to split it", False, True)
