"""What scripts prepare, in which order and how often, and what is refused: before the first step, with the remedy."""

import copy
import os
from functools import partial

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.tracking import GeneralTracker
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, GradScalerKwargs
from accelerate_checks import (
    MICROBATCHES,
    Toy,
    accelerated_loop,
    adamw,
    assert_same,
    batches,
    fresh_accelerator,
    loss_inside,
    mine,
    on_ranks,
    plain_loop,
    toy,
    whole_state,
)
from torch import nn
from torchmetrics import MeanMetric

from smp_strategy import ConfigError, SMPError, SMPPlugin, UnsupportedError

PP2 = {"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES}


def refused_options():
    cases = [
        ({"tp_size": 2}, "tensor_parallel_degree"),
        ({"dp_shard_size": 2}, "sharded_data_parallel_degree"),
        ({"dp_replicate_size": 2}, "left over"),
        ({"cp_size": 2}, "context"),
        ({"microbatchs": 2}, "microbatches"),
        ({"loss_in_model": "perhaps"}, "loss_in_model"),
        ({"loss_reduction": "max", "training_outputs": "none"}, "2 options"),
        ({"pipeline_parallel_degree": 2}, "must divide the number of ranks"),
        ({"loss_scale": 8.0}, "nothing computes in float16"),
    ]
    for options, match in cases:
        with pytest.raises(ConfigError, match=match):
            fresh_accelerator(options)
    for options, match in [
        ({"mixed_precision": "fp16"}, "fp16=True"),
        ({"dynamo_backend": "eager"}, "compile=True"),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin()}, "FSDP"),
    ]:
        with pytest.raises(ConfigError, match=match):
            fresh_accelerator({}, **options)
    hooked = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    with pytest.raises(ConfigError, match="reduce_dtype"):
        fresh_accelerator({}, kwargs_handlers=[hooked])
    with pytest.raises(ConfigError, match="init_scale"):
        fresh_accelerator({"fp16": True}, kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    with pytest.raises(ConfigError, match="both choose"):
        fresh_accelerator({"bf16": True}, mixed_precision="bf16")
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    with pytest.raises((ConfigError, ImportError)):
        Accelerator(cpu=True, parallelism_config=SMPPlugin())
    del os.environ["ACCELERATE_USE_DEEPSPEED"]
    os.environ["SMP_MICROBATCHES"] = "3"
    os.environ["SMP_LOSS_IN_MODEL"] = "false"
    plugin = SMPPlugin()
    assert (plugin.microbatches, plugin.loss_in_model) == (3, False)
    assert SMPPlugin(microbatches=5).microbatches == 5
    assert SMPPlugin(loss_in_model=True).loss_in_model is True
    assert copy.deepcopy(plugin).config == plugin.config


def test_options_that_cannot_be_are_refused():
    on_ranks(refused_options, 1)


class Named(Accelerator):
    """A user's own."""


def classes():
    accelerator = fresh_accelerator(PP2)
    assert type(accelerator).__name__ == "Accelerator"
    assert type(accelerator).__module__ == "accelerate.accelerator"
    assert isinstance(accelerator, Accelerator)
    second = Accelerator()  # of the same process: Accelerate's state knows the plugin
    assert second.smp is not accelerator.smp
    own = Named(cpu=True, parallelism_config=SMPPlugin(**PP2))
    assert isinstance(own, Named)
    assert type(own).__name__ == "Named"


def test_the_accelerator_keeps_its_class():
    on_ranks(classes, 2)


def refused_objects():
    accelerator = fresh_accelerator(PP2)
    model, other = toy(), Toy()
    with pytest.raises(ConfigError, match="compile=True"):
        accelerator.prepare(torch.compile(model))
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(ConfigError, match="trains 1 of"):
        accelerator.prepare(model, optimizer)
    accelerator.free_memory()
    prepared = accelerator.prepare(model)
    assert prepared is model
    assert accelerator.prepare(model) is model
    with pytest.raises(UnsupportedError, match="one such model"):
        accelerator.prepare(other)
    with pytest.raises(SMPError, match="another Accelerator"):
        Accelerator().prepare(model)


def test_objects_that_cannot_be_prepared_are_refused():
    on_ranks(refused_objects, 2)


def with_a_teacher(at_once):
    accelerator = fresh_accelerator(PP2)
    teacher, model = toy().requires_grad_(False), toy()
    if at_once:
        teacher, model = accelerator.prepare(teacher, model)
    else:
        model = accelerator.prepare(model)
        teacher = accelerator.prepare(teacher)
    optimizer = accelerator.prepare(adamw(model))
    for batch in batches():
        wanted = teacher(batch["inputs"])["logits"]
        loss = nn.functional.mse_loss(model(batch["inputs"])["logits"], wanted + 1)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return whole_state(accelerator)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_frozen_model_beside_the_trained_one_stays_whole(at_once):
    teacher, model = toy(), toy()

    def distilled(model, batch):
        with torch.no_grad():
            wanted = teacher(batch["inputs"])["logits"]
        return nn.functional.mse_loss(model(batch["inputs"])["logits"], wanted + 1)

    plain_loop(model, adamw(model), batches(), loss_of=distilled)
    assert_same(on_ranks(with_a_teacher, 2, at_once)[0], model.state_dict(), rtol=1e-5, atol=1e-6)


class WithMetric(Toy):
    """Its loss is a metric object, which keeps sums of earlier calls."""

    def __init__(self):
        super().__init__()
        self.metric = MeanMetric()

    def forward(self, inputs, targets):
        logits = super().forward(inputs)["logits"]
        return {"loss": self.metric(nn.functional.cross_entropy(logits, targets, reduction="none"))}


def with_a_metric():
    accelerator = fresh_accelerator(PP2)
    model = WithMetric()
    model, optimizer = accelerator.prepare(model, adamw(model))
    with pytest.raises(SMPError, match=r"of microbatch 0 .* call its function instead|rank 0 failed first"):
        accelerated_loop(accelerator, model, optimizer, batches())


def test_a_metric_object_in_the_model_is_refused_with_the_remedy():
    on_ranks(with_a_metric, 2)


class Criterion(nn.Module):
    """Has no parameters."""

    def forward(self, outputs, wanted):
        return nn.functional.mse_loss(outputs["logits"], wanted)


def beside_others(way, smp):
    accelerator = fresh_accelerator(smp)
    torch.manual_seed(5)
    teacher, model, criterion = Toy(), toy(), accelerator.prepare(Criterion())
    optimizer = adamw(model)
    if way == "frozen":
        teacher = accelerator.prepare(teacher.requires_grad_(False))
    elif way == "used":
        teacher = accelerator.prepare(teacher.eval())
        with torch.no_grad():
            teacher(batches()[0]["inputs"])
    elif way == "evaluation_mode":
        teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
    elif way == "both in evaluation mode":
        model.eval()
        teacher, model, optimizer = accelerator.prepare(teacher.eval(), model, optimizer)
        model.train()
    if way != "both in evaluation mode":
        model, optimizer = accelerator.prepare(model, optimizer)
    for batch in batches():
        batch = mine(accelerator, batch)
        with torch.no_grad():
            wanted = teacher(batch["inputs"])["logits"]
        accelerator.backward(criterion(model(batch["inputs"]), wanted))
        optimizer.step()
        optimizer.zero_grad()
    assert all(parameter.numel() for parameter in teacher.parameters())
    return whole_state(accelerator)


@pytest.mark.parametrize("smp", [PP2, {"sharded_data_parallel_degree": 2, "microbatches": 2}], ids=["pp2", "sdp2"])
@pytest.mark.parametrize("way", ["frozen", "used", "evaluation_mode", "both in evaluation mode"])
def test_the_trained_model_is_spread_whatever_comes_first(way, smp):
    torch.manual_seed(5)
    teacher, model = Toy(), toy()
    optimizer = adamw(model)
    for batch in batches():
        with torch.no_grad():
            wanted = teacher(batch["inputs"])["logits"]
        Criterion()(model(batch["inputs"]), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(on_ranks(beside_others, 2, way, smp)[0], model.state_dict(), rtol=1e-4, atol=1e-5)


def trained_after_all():
    accelerator = fresh_accelerator({"sharded_data_parallel_degree": 2})
    teacher, model = toy().eval(), Toy()
    teacher, model = accelerator.prepare(teacher), accelerator.prepare(model)
    teacher(**batches()[0])["loss"].backward()
    with pytest.raises(UnsupportedError, match="one such model"):
        adamw(teacher).step()
    accelerator.free_memory()
    assert "no_sync" in vars(accelerator.prepare(teacher))  # which is the one that is spread now


def test_a_model_that_is_not_spread_is_not_trained():
    on_ranks(trained_after_all, 2)


def in_any_way(way, smp):
    accelerator = fresh_accelerator(smp)
    model = toy()
    if way == "optimizer first":
        optimizer = accelerator.prepare(adamw(model))
        model = accelerator.prepare(model)
    elif way == "optimizer last":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(adamw(model))
    elif way == "optimizer after a step":
        model = accelerator.prepare(model)
        with torch.no_grad():
            model(**batches()[0])
        optimizer = accelerator.prepare(adamw(model))
    elif way == "two optimizers":
        halves = [[*model.inlet.parameters(), *model.blocks[:2].parameters()]]
        halves += [[*model.blocks[2:].parameters(), *model.outlet.parameters()]]
        model, *both = accelerator.prepare(model, *(torch.optim.AdamW(each, lr=0.05, eps=1e-3) for each in halves))
    elif way == "groups":
        rest = [each for name, each in model.named_parameters() if not name.startswith("outlet")]
        groups = [{"params": rest}, {"params": model.outlet.parameters(), "weight_decay": 0.01}]
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(groups, lr=0.05, eps=1e-3))
    else:
        optimizer = adamw(model)
        model = accelerator.prepare(model)
    for batch in batches():
        accelerator.backward(loss_inside(model, mine(accelerator, batch)))
        for each in both if way == "two optimizers" else [optimizer]:
            each.step()
            each.zero_grad()
    return whole_state(accelerator)


WAYS = ("optimizer first", "optimizer last", "optimizer after a step", "two optimizers", "groups", "unprepared")


def in_all_ways(smp):
    return {way: in_any_way(way, smp) for way in WAYS}


@pytest.mark.dear
@pytest.mark.parametrize(
    "smp",
    [
        PP2,
        {"shard_optimizer_state": True, "microbatches": MICROBATCHES // 2},
        {"sharded_data_parallel_degree": 2, "microbatches": MICROBATCHES // 2},
    ],
    ids=["pp2", "zero1", "sdp2"],
)
def test_optimizers_are_prepared_in_any_way(smp):
    model = toy()
    plain_loop(model, adamw(model), batches())
    tolerance = {} if smp is PP2 else {"rtol": 1e-5, "atol": 1e-6}
    for way, weights in on_ranks(in_all_ways, 2, smp)[0].items():
        try:
            assert_same(weights, model.state_dict(), **tolerance)
        except AssertionError as error:
            raise AssertionError(way) from error


class Noted(GeneralTracker):
    """Keeps what is logged."""

    name = "noted"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.values = []

    @property
    def tracker(self):
        return self.values

    def store_init_configuration(self, values):
        self.values.append(values)

    def log(self, values, step=None, **kwargs):
        self.values.append((step, values))


def triggered():
    accelerator = fresh_accelerator(PP2)
    assert not accelerator.check_trigger()
    if accelerator.is_main_process:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


def test_a_trigger_of_any_rank_reaches_all():
    on_ranks(triggered, 2)


def ended():
    noted = Noted()
    accelerator = fresh_accelerator(PP2, log_with=noted)
    accelerator.init_trackers("run", config={"lr": 0.05})
    model = toy()
    for half in (batches()[:3], batches()[3:]):
        accelerator.free_memory()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number, batch in enumerate(half):
            loss = loss_inside(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": loss.item()}, step=number)
    accelerator.end_training()
    assert "forward" not in vars(model)
    with torch.no_grad():
        return noted.values, model.state_dict(), model(**batches()[0])["loss"]


def test_a_model_is_freed_trained_on_and_whole_at_the_end():
    model = toy()
    losses = plain_loop(model, torch.optim.SGD(model.parameters(), lr=0.1), batches())
    with torch.no_grad():
        last = model(**batches()[0])["loss"]
    for rank, (values, weights, loss) in enumerate(on_ranks(ended, 2)):
        assert_same(weights, model.state_dict())
        torch.testing.assert_close(loss, last)
        if rank == 0:
            expected = [{"loss": loss.item()} for loss in losses]
            assert values == [{"lr": 0.05}, *[(number % 3, each) for number, each in enumerate(expected)]]
        else:
            assert values == []


def prepares_lazy_layers(lazy):
    def prepared(is_called):
        model = nn.Sequential(nn.Linear(8, 8), lazy(), nn.Linear(8, 2))
        if is_called:
            model(torch.zeros(4, 8))
        accelerator = fresh_accelerator({"pipeline_parallel_degree": 1})
        return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(ConfigError, match=r"`1\.\w+` belongs to a lazy layer .* before `accelerator.prepare`"):
        prepared(is_called=False)
    accelerator, model, optimizer = prepared(is_called=True)
    accelerator.backward(model(torch.ones(4, 8)).square().mean())
    optimizer.step()


@pytest.mark.parametrize("lazy", [partial(nn.LazyLinear, 8), partial(nn.LazyBatchNorm1d, affine=False)])
def test_lazy_layers_see_an_input_first(lazy):
    on_ranks(prepares_lazy_layers, 1, lazy)
