"""The command ``smp import``."""

from argparse import Namespace

from smp_strategy.checkpoint.convert.contents import OptimizerContents
from smp_strategy.checkpoint.convert.detect_format import open_checkpoint
from smp_strategy.checkpoint.convert.layouts import add_prefix, add_tied
from smp_strategy.checkpoint.convert.writers import save_full, save_sharded
from smp_strategy.checkpoint.storage.remote_path import any_path
from smp_strategy.checkpoint.tools.export import check_output, num_entries, on_this_machine, show_progress, tell

__all__ = ["run"]


def run(given: Namespace) -> int:
    """Run the command; returns its exit status."""
    target, check = check_output(given)
    like = {} if given.like is None else open_checkpoint(any_path(given.like)).weight_tensors()
    # `--like` may be a checkpoint with or without the prefix.
    shapes = {name: tensor.shape for name, tensor in like.items()}
    shapes |= {name.removeprefix(given.prefix): shape for name, shape in shapes.items()}
    contents = open_checkpoint(any_path(given.checkpoint), weights_at=given.weights, like=shapes or None)
    if given.prefix:
        contents.weights = add_prefix(contents.weights, given.prefix)
        contents.optimizers = [_renamed(optimizer, given.prefix) for optimizer in contents.optimizers]
    contents.remarks += add_tied(contents.weights, like)
    with show_progress(num_entries(contents), is_quiet=given.quiet) as progress:
        if given.form == "sharded":
            save_sharded(contents, target, progress, check)
        else:
            save_full(contents, on_this_machine(target), progress, check)
    if not given.quiet:
        tell([*contents.remarks, f"{given.checkpoint} ({contents.kind}) -> {target}"])
    return 0


def _renamed(optimizer: OptimizerContents, prefix: str) -> OptimizerContents:
    groups = [{**group, "params": [prefix + name for name in group["params"]]} for group in optimizer.groups]
    return OptimizerContents(add_prefix(optimizer.state, prefix), groups)
