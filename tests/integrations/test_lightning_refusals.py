"""What cannot work is refused before training, all of it at once."""

import os
from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
from lightning_toy import NEWER, OLDER, on_ranks, toy_loader, toy_module, toy_trainer

from smp_strategy.errors import ConfigError, SMPError
from smp_strategy.integrations.lightning import make_strategy
from smp_strategy.integrations.lightning.child_processes import Children
from smp_strategy.integrations.lightning.tree import Tree
from smp_strategy.integrations.lightning.validation import grows_later, refuse_unsupported


def refused(folder, options, overrides):
    module = toy_module(**overrides)
    trainer = toy_trainer(folder, smp={"microbatches": 2}, **options)
    try:
        trainer.fit(module, toy_loader())
    except SMPError as error:
        return type(error).__name__, str(error), module.seen
    return None


def lbfgs(self):
    return torch.optim.LBFGS(self.parameters())


def takes_an_iterator(self, dataloader_iter):
    raise NotImplementedError


def lazy_head(self):
    self.head = torch.nn.LazyLinear(2)


@pytest.mark.parametrize(
    ("options", "overrides", "match"),
    [
        ({}, {"configure_model": lazy_head}, "head.weight` belongs to a lazy layer"),
        ({}, {"configure_optimizers": lbfgs}, "LBFGS"),
        ({}, {"training_step": takes_an_iterator}, "dataloader_iter"),
        ({"sync_batchnorm": True}, {}, "sync_batchnorm"),
    ],
)
def test_an_unsupported_feature_is_named_before_training(options, overrides, match, tmp_path):
    [(kind, text, seen)] = on_ranks(refused, 1, tmp_path, options, overrides)
    assert kind == "ConfigError"
    assert match in text
    assert seen == []


def test_all_problems_are_listed_together(tmp_path):
    overrides = {"configure_optimizers": lbfgs, "training_step": takes_an_iterator}
    [(_, text, _)] = on_ranks(refused, 1, tmp_path, {"sync_batchnorm": True}, overrides)
    assert text.startswith("3 options are wrong")


def prune(folder, smp):
    pruning = import_module(f"{NEWER}.callbacks").ModelPruning("l1_unstructured", amount=0.3)
    module, trainer = toy_module(), toy_trainer(folder, smp=smp, callbacks=[pruning])
    with pytest.raises(ConfigError, match=r"ModelPruning puts other parameters") if smp else nullcontext():
        trainer.fit(module, toy_loader())
    return module.seen, [(layer.weight == 0).sum().item() for layer in module.net[::2]]


@pytest.mark.parametrize("axis", ["pipeline_parallel_degree", "sharded_data_parallel_degree", "tensor_parallel_degree"])
def test_layers_that_are_spread_are_not_pruned_during_training(axis, tmp_path):
    assert [seen for seen, _ in on_ranks(prune, 2, tmp_path, {axis: 2})] == [[], []]


def test_layers_that_every_rank_has_are_pruned_during_training(tmp_path):
    [(seen, zeros)] = on_ranks(prune, 1, tmp_path, {})
    assert len(seen) == 12
    assert sum(zeros) > 100


@pytest.mark.parametrize("norm", [None, 1.0])
@pytest.mark.parametrize("clips", [None, 0, 0.5])
def test_gradients_are_clipped_by_the_trainer_or_by_the_strategy(clips, norm, tmp_path):
    trainer = toy_trainer(tmp_path, smp={}, gradient_clip_val=clips)
    object.__setattr__(trainer.strategy.config, "sdp_gradient_clipping", norm)
    both = pytest.raises(ConfigError, match=r"`sdp_gradient_clipping` \(1.0\) contradicts `gradient_clip_val` \(0.5\)")
    with both if norm and clips else nullcontext():
        refuse_unsupported(trainer, toy_module(), [], spreads=False)


def test_wrong_options_are_refused_when_the_strategy_is_made():
    with pytest.raises(ConfigError, match=r"(?s)3 options are wrong.*microbatchs.*pipeline_parallel_degree"):
        make_strategy(NEWER)(microbatchs=4, pipeline_parallel_degree=0, pipeline="fast")


def test_a_trainer_of_the_other_tree_names_the_right_import(tmp_path):
    trainer = import_module(OLDER).Trainer
    with pytest.raises(ValueError, match=r"smp_strategy\.pytorch_lightning\.SMPStrategy"):
        trainer(strategy=make_strategy(NEWER)(), default_root_dir=tmp_path)


def test_the_pipeline_is_not_there_before_setup():
    with pytest.raises(SMPError, match="on_fit_start"):
        _ = make_strategy(NEWER)().engine


def refused_before_start(folder, smp, devices, **overrides):
    """What is said before any process is started; ``None`` if one would be."""

    class StartedError(Exception):
        pass

    def started(children, rank, command, environment, folder):
        raise StartedError(rank)

    Children.start = started
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(variable)
    trainer = toy_trainer(folder, smp=smp, devices=devices, num_nodes=overrides.pop("num_nodes", 1))
    try:
        trainer.fit(toy_module(**overrides), toy_loader())
    except ConfigError as error:
        return str(error)
    except StartedError:
        return None


@pytest.mark.parametrize(
    ("smp", "devices", "said"),
    [
        (
            {"pipeline_parallel_degree": 64},
            64,
            "`pipeline_parallel_degree` is 64, but the model can be cut into",
        ),
        ({"pipeline_parallel_degree": 2}, 3, "`pipeline_parallel_degree` must divide the number of ranks (3)"),
        ({"tensor_parallel_degree": 2}, 3, "`tensor_parallel_degree` must divide the number of ranks (3)"),
        (
            {"sharded_data_parallel_degree": 4},
            6,
            "`sharded_data_parallel_degree` must divide the number of replicas (6",
        ),
        ({"pipeline_parallel_degree": 2, "sharded_data_parallel_degree": 4}, 4, "Degrees that fit: 1, 2."),
        ({"pipeline_parallel_degree": 2, "unit_classes": ("Nothing",)}, 2, "no module of such a class"),
        ({"pipeline_parallel_degree": 2}, 2, None),
        ({}, 5, None),  # the library chooses a degree
    ],
)
def test_degrees_are_checked_before_a_process_is_started(smp, devices, said, tmp_path):
    (told,) = on_ranks(refused_before_start, 1, tmp_path, smp, devices)
    assert told is None if said is None else said in told


def later(self, *args):
    pass


@pytest.mark.parametrize("hook", ["configure_model", "setup"])
def test_units_are_counted_later_where_the_module_may_grow(hook, tmp_path):
    def refused(**overrides):
        return on_ranks(refused_before_start, 1, tmp_path, {"pipeline_parallel_degree": 64}, 64, **overrides)

    assert refused(**{hook: later}) == [None]
    assert refused(on_fit_start=later) != [None]


def test_devices_of_all_machines_count(tmp_path):
    smp = {"pipeline_parallel_degree": 4}
    assert on_ranks(refused_before_start, 1, tmp_path, smp, 2) != [None]
    assert on_ranks(refused_before_start, 1, tmp_path, smp, 2, num_nodes=2) == [None]


def test_a_callback_of_the_user_may_let_the_module_grow(tmp_path):
    tree, module = Tree(NEWER), toy_module()

    class Grows(tree.pytorch("callbacks").Callback):
        def setup(self, trainer, pl_module, stage):
            pass

    class Looks(tree.pytorch("callbacks").Callback):
        def on_fit_start(self, trainer, pl_module):
            pass

    def grows(*callbacks):
        return grows_later(toy_trainer(tmp_path, callbacks=list(callbacks), enable_checkpointing=True), module, tree)

    assert not grows()
    assert not grows(Looks())
    assert grows(Looks(), Grows())
