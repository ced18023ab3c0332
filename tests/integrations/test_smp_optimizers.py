"""``smp.DistributedOptimizer``: loss scaling, clipping, schedulers, and optimizers that are not wrapped."""

import pytest
import torch
import torch.nn.functional as F
from smp_checks import LAYOUTS, adamw, assert_same, batches, begin, mine, net, on_ranks, plain, train_step

import smp_strategy.smp as smp
from smp_strategy import ConfigError, UnsupportedError

PP2 = {"partitions": 2, "microbatches": 4}
HALF = {"dynamic_loss_scale": True}


def scaled(parameters, options, infinite_at=()):
    smp.init(parameters)
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
    found = []
    for number, (data, targets) in enumerate(batches(5)):
        optimizer.zero_grad()
        before = optimizer.loss_scale
        data = data * float("inf") if number in infinite_at else data
        train_step(model, data, targets)
        norm = optimizer.clip_master_grads(1e3)
        optimizer.step()
        found.append((before, optimizer.overflow, float(norm)))
    return found, model.state_dict()


def test_a_static_loss_scale_does_not_change_float16_training():
    parameters = PP2 | {"fp16": True}
    runs = [on_ranks(scaled, 2, parameters, {"static_loss_scale": scale}) for scale in (1.0, 128.0)]
    for found, state in runs[1]:
        assert [(scale, overflow) for scale, overflow, _ in found] == [(128.0, False)] * 5
        for name, value in runs[0][0][1].items():
            torch.testing.assert_close(state[name], value, rtol=1e-2, atol=1e-3)
            assert value.dtype == torch.float32


@pytest.mark.parametrize("layout", ["pp2", "sdp2", "replicas2"])
def test_a_dynamic_loss_scale_skips_steps_that_overflow_on_all_ranks(layout):
    ranks, parameters = LAYOUTS[layout]
    rules = {"init_scale": 1024, "scale_window": 2, "min_scale": 1, "delayed_shift": 1}
    options = {**HALF, "dynamic_loss_args": rules}
    for found, _ in on_ranks(scaled, ranks, parameters | {"fp16": True}, options, (1,)):
        assert [(scale, overflow) for scale, overflow, _ in found] == [
            (1024.0, False),
            (1024.0, True),
            (512.0, False),
            (512.0, False),
            (1024.0, False),
        ]


def shapes_of_groups():
    parameters = {"sharded_data_parallel_degree": 2, "ddp": True, "sdp_param_persistence_threshold": 0}
    model, optimizer = begin(parameters)
    train_step(model, *mine(batches()[0]))
    optimizer.step()
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    return [{names[each]: each.shape for each in group} for group in optimizer.fp16_groups]


def test_groups_of_a_sharded_optimizer_have_names_and_whole_shapes():
    expected = [{name: each.shape for name, each in net().named_parameters()}]
    assert on_ranks(shapes_of_groups, 2) == [expected, expected]


def test_dynamic_scaling_begins_with_sagemakers_scale():
    found, _ = on_ranks(scaled, 2, PP2 | {"fp16": True}, HALF)[0]
    assert found[0][:2] == (2.0**32, True)
    assert found[1][0] == 2.0**31


def refused():
    smp.init(PP2)
    with pytest.raises(ConfigError, match="SGD has no parameters of a wrapped model"):
        smp.DistributedOptimizer(torch.optim.SGD(net().parameters()))
    model = smp.DistributedModel(net())
    optimizer = torch.optim.SGD(model.parameters())
    train_step(model, *batches()[0])
    with pytest.raises(UnsupportedError, match="SGD steps without being wrapped"):
        optimizer.step()
    wrapped = smp.DistributedOptimizer(optimizer)
    with pytest.raises(ConfigError, match="Wrap it once"):
        smp.DistributedOptimizer(wrapped)
    wrapped.step()


def test_optimizers_that_are_not_wrapped_are_refused():
    on_ranks(refused, 2)


def unknown_rules():
    smp.init(PP2 | {"fp16": True})
    model = smp.DistributedModel(net())
    with pytest.raises(ConfigError, match="`dynamic_loss_args` got unknown entries: scale_windows"):
        smp.DistributedOptimizer(adamw(model.parameters()), **HALF, dynamic_loss_args={"scale_windows": 1})


def test_unknown_rules_of_scaling_are_refused():
    on_ranks(unknown_rules, 2)


def clipped(parameters, by):
    model, optimizer = begin(parameters)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer if by == "torch" else optimizer, 2)
    norms = []
    for batch in batches():
        optimizer.zero_grad()
        train_step(model, *mine(batch))
        if by == "torch":
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        else:
            norms.append(optimizer.clip_master_grads(0.5))
        optimizer.step()
        scheduler.step()
    return torch.stack(norms), model.state_dict()


@pytest.mark.parametrize("by", ["torch", "smp"])
@pytest.mark.parametrize("layout", ["pp2", "sdp2", "tp2", "pp2 x replicas2"])
def test_gradients_are_clipped_by_the_norm_over_all_ranks(layout, by):
    ranks, parameters = LAYOUTS[layout]
    model = net()
    optimizer = adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    norms = []
    for data, targets in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(data), targets).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        scheduler.step()
    for found in on_ranks(clipped, ranks, parameters, by):
        torch.testing.assert_close(found[0], torch.stack(norms), rtol=1e-5, atol=1e-6)
        assert_same(found[1], model.state_dict(), rtol=1e-5, atol=1e-6)


def always_clipped(parameters):
    model, optimizer = begin(parameters)
    for batch in batches():
        optimizer.zero_grad()
        train_step(model, *mine(batch))
        optimizer.step()
    return model.state_dict()


def test_sharded_data_parallelism_clips_by_one_as_sagemakers_does():
    model = net()
    optimizer = adamw(model.parameters())
    for data, targets in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(data), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for found in on_ranks(always_clipped, 2, {"sharded_data_parallel_degree": 2}):
        assert_same(found, model.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("more", [{}, {"partitions": 2, "microbatches": 4}])
def test_sharded_optimizer_state_trains_the_same(more):
    parameters = {"shard_optimizer_state": True, "ddp": True, **more}
    _, weights = plain(replicas=2)
    for found in on_ranks(always_clipped, 4 if more else 2, parameters):
        assert_same(found, weights, rtol=1e-5, atol=1e-6)


@smp.step
def scaled_step(model, scaler, data, targets):
    loss = F.cross_entropy(model(data), targets)
    model.backward(scaler.scale(loss))
    return loss


def with_scaler(parameters):
    model, optimizer = begin(parameters)
    scaler = smp.amp.GradScaler(init_scale=2.0**4, growth_interval=2)
    for number, (data, targets) in enumerate(batches()):
        optimizer.zero_grad()
        data = data * (float("inf") if number == 1 else 1)
        scaled_step(model, scaler, *mine((data, targets)))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), model.state_dict()


@pytest.mark.parametrize("layout", ["pp2", "replicas2", "sdp2"])
def test_a_gradient_scaler_skips_on_all_ranks(layout):
    ranks, parameters = LAYOUTS[layout]
    model = net()
    optimizer = adamw(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
    for number, (data, targets) in enumerate(batches()):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(data * (float("inf") if number == 1 else 1)), targets)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    for scale, weights in on_ranks(with_scaler, ranks, parameters):
        assert scale == scaler.get_scale()
        assert_same(weights, model.state_dict(), rtol=1e-5, atol=1e-6)
