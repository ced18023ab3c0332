"""Which Hugging Face models load under delayed initialisation as ``from_pretrained`` loads them otherwise?

    python -m benchmarks.pretrained_architectures                       # all of the table in tests/parity/huggingface
    python -m benchmarks.pretrained_architectures --quick 20            # so many of them, spread over the table
    python -m benchmarks.pretrained_architectures GPT2LMHeadModel ...   # those that are named
    python -m benchmarks.pretrained_architectures --variant bin ...     # saved or loaded in another way

A tiny random model is saved. One is loaded plainly, another one is deferred, put on the meta device and filled. Both
must have the same parameters and buffers: names, dtypes, strides, ties, ``requires_grad`` and every bit. It is counted
which weights of the file are read before they are needed. The last line of the output is the score, as JSON.
"""

import argparse
import functools
import json
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn

from smp_strategy.engine import pretrained
from smp_strategy.engine.delayed_init import DelayedModule
from smp_strategy.engine.pretrained import deferring
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.deferred_tensor import DeferredTensor, ReadRun
from tests.parity.huggingface.architecture import Architecture
from tests.parity.huggingface.table import ARCHITECTURES

__all__ = ["VARIANTS", "main"]

CPU = torch.device("cpu")
# So many names in a line of the output.
MOST_NAMES = 4


def main() -> None:
    options = _options()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    table = {each.name: each for each in ARCHITECTURES if not options.names or each.name in options.names}
    names = sorted(table)
    if options.quick:
        names = names[:: max(1, len(names) // options.quick)][: options.quick]
    found: Counter[str] = Counter()
    for name in names:
        verdict, reason, read = judge(table[name], options.variant)
        found[verdict] += 1
        found["read_early"] += bool(read)
        early = f" reads {_listed(read)}" if read else ""
        print(f"{name:48} {verdict:8} {reason}{early}", flush=True)
    print(
        json.dumps({"models": len(names), **{key: found[key] for key in ("equal", "read_early", "refused", "failed")}})
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="names of models; all if there are none")
    parser.add_argument("--quick", type=int, default=0, metavar="N", help="only N models of the table")
    parser.add_argument("--variant", choices=VARIANTS, default="plain", help="how models are saved and loaded")
    return parser.parse_args()


def judge(architecture: Architecture, variant: str = "plain") -> tuple[str, str, list[str]]:
    """What becomes of it, why, and which weights are read early."""
    reads: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            load = VARIANTS[variant](architecture, Path(folder))
            expected = _loaded(load)
        except Exception as error:
            return "failed", f"loads nowhere: {_described(error)}", reads
        try:
            with torch.device("meta"), deferring(), _counting(reads):
                model = _loaded(load)
            early = sorted(set(reads))
            kinds = {name: type(tensor) for name, tensor in _named(model).items() if tensor.is_meta}
            lost = [name for name, kind in kinds.items() if not issubclass(kind, DeferredTensor)]
            DelayedModule(model, 0, CPU).prepare([])
        except UnsupportedError as error:
            return "refused", _described(error), sorted(set(reads))
        except Exception as error:
            return "failed", _described(error), sorted(set(reads))
        problems = [*(f"`{name}` was not loaded" for name in lost), *differences(model, expected)]
    return "failed" if problems else "equal", "; ".join(problems[:MOST_NAMES]), early


def _loaded(load: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return load()


@contextmanager
def _counting(reads: list[str]) -> Iterator[None]:
    """Note in ``reads`` which tensors of files are read, also later."""
    original = pretrained.defer  # type: ignore[attr-defined]  # what it imports

    def defer(
        like: Tensor, device: torch.device, read: Callable[[], Tensor], read_run: ReadRun | None = None
    ) -> DeferredTensor:
        name = read.args[0] if isinstance(read, functools.partial) else f"a tensor {list(like.shape)}"

        def counted() -> Tensor:
            reads.append(name)
            return read()

        return original(like, device, counted, read_run)

    with patch.object(pretrained, "defer", defer):
        yield


def differences(model: nn.Module, expected: nn.Module) -> list[str]:
    """How the tensors of ``model`` differ from those of ``expected``."""
    mine, others = _named(model), _named(expected)
    found = [f"`{name}` is only in one of them" for name in mine.keys() ^ others.keys()]
    if list(mine) != list(others):
        found.append("another order of names")
    if _ties(mine) != _ties(others):
        found.append(f"ties {_ties(mine) - _ties(others)} for {_ties(others) - _ties(mine)}")
    for name in mine.keys() & others.keys():
        found += [f"`{name}` {problem}" for problem in _different(mine[name], others[name])]
    if model.training != expected.training:
        found.append("another mode")
    return [*found, *_different_attributes(model, expected)]


def _different(mine: Tensor, other: Tensor) -> list[str]:
    found = []
    for key in ("dtype", "shape", "device", "requires_grad", "is_leaf", "__class__"):
        if getattr(mine, key) != getattr(other, key):
            found.append(f"has {key} {getattr(mine, key)} for {getattr(other, key)}")
    if not found and mine.stride() != other.stride():
        found.append(f"has strides {mine.stride()} for {other.stride()}")
    if not found and not _same_bits(mine, other):
        found.append(f"has other values, by {(mine.double() - other.double()).abs().max().item():.1e}")
    return found


def _same_bits(mine: Tensor, other: Tensor) -> bool:
    return torch.equal(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (mine, other)))


def _different_attributes(model: nn.Module, expected: nn.Module) -> list[str]:
    """Plain attributes that are tensors: they must have values as well."""
    modules = dict(expected.named_modules())
    found = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                other = vars(modules[name]).get(key)
                found += [f"attribute `{name}.{key}` {problem}" for problem in _different(value, other)]
    return found


def _named(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def _ties(named: Mapping[str, Tensor]) -> set[tuple[str, ...]]:
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, tensor in named.items():
        names[id(tensor)].append(name)
    return {tuple(each) for each in names.values() if len(each) > 1}


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def _listed(names: list[str]) -> str:
    rest = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


# A variant saves a model to a folder, and says how to load it.
Variant = Callable[[Architecture, Path], Callable[[], nn.Module]]


def _variant(keep: Callable[[nn.Module, Path], None] | None = None, **options: Any) -> Variant:
    def save_and_load(architecture: Architecture, folder: Path) -> Callable[[], nn.Module]:
        model: Any = architecture.build().model
        (keep or (lambda model, folder: model.save_pretrained(folder)))(model, folder)
        return functools.partial(type(model).from_pretrained, folder, **options)

    return save_and_load


def _in_shards(model: Any, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size="100KB")


def _as_bin(model: Any, folder: Path) -> None:
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def _in_bfloat16(model: Any, folder: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)


def _with_others(model: Any, folder: Path) -> None:
    """One key more than the model has, and every second parameter missing."""

    def changed(state: dict[str, Tensor]) -> dict[str, Tensor]:
        # Experts are merged, so none may be missing. Parametrizations transformers leaves uninitialised.
        kept = [name for name in state if "experts" in name or "parametrizations" in name]
        return {**{name: state[name] for name in [*list(state)[::2], *kept]}, "more.weight": torch.ones(3)}

    _in_safetensors(model, folder, changed)


def _with_legacy_keys(model: Any, folder: Path) -> None:
    """Names of older releases, which transformers renames."""
    older = {
        ".parametrizations.weight.original0": ".weight_g",
        ".parametrizations.weight.original1": ".weight_v",
        "LayerNorm.weight": "LayerNorm.gamma",
        "LayerNorm.bias": "LayerNorm.beta",
    }

    def renamed(name: str) -> str:
        for end, old in older.items():
            name = name.removesuffix(end) + old if name.endswith(end) else name
        return name

    _in_safetensors(model, folder, lambda state: {renamed(name): tensor for name, tensor in state.items()})


def _as_base(architecture: Architecture, folder: Path) -> Callable[[], nn.Module]:
    """Only the base model is saved; the head is missing."""
    model: Any = architecture.build().model
    model.base_model.save_pretrained(folder)
    return functools.partial(type(model).from_pretrained, folder)


def _as_base_of_classifier(architecture: Architecture, folder: Path) -> Callable[[], nn.Module]:
    """Only the base model is saved, and gets another head."""
    _as_base(architecture, folder)
    return functools.partial(transformers.AutoModelForSequenceClassification.from_pretrained, folder, num_labels=3)


def _in_safetensors(model: Any, folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    from safetensors.torch import load_file, save_file

    model.save_pretrained(folder)
    [file] = folder.glob("*.safetensors")
    save_file(change(load_file(file)), file, {"format": "pt"})


VARIANTS: dict[str, Variant] = {
    "plain": _variant(),
    "bfloat16": _variant(dtype=torch.bfloat16),
    "auto": _variant(_in_bfloat16, dtype="auto"),
    "shards": _variant(_in_shards),
    "bin": _variant(_as_bin),
    "others": _variant(_with_others),
    "legacy": _variant(_with_legacy_keys),
    "base": _as_base,
    "classifier": _as_base_of_classifier,
}


if __name__ == "__main__":
    main()
