"""What goes into functions with ``@smp.step``, and what comes out of them."""

import argparse
import collections
import copy

import pytest
import torch
import torch.nn.functional as F
from smp_checks import (
    BATCH,
    CLASSES,
    LAYOUTS,
    WIDTH,
    Net,
    adamw,
    batches,
    begin,
    mine,
    net,
    on_ranks,
    plain,
    train_step,
)
from torch import nn

import smp_strategy.smp as smp
from smp_strategy import ConfigError, SMPError, UnsupportedError
from smp_strategy.smp import StepOutput

PP2 = {"partitions": 2, "microbatches": 4}
TP2 = {"tensor_parallel_degree": 2, "microbatches": 2, "ddp": True, "optimize": "speed"}

# --- outputs --------------------------------------------------------------------------------------------------------


def test_a_step_output_joins_the_tensors_of_the_microbatches():
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]
    output = StepOutput(parts)
    assert output.outputs == parts
    assert output.reduce_mean().tolist() == [2.0, 4.0]
    assert output.reduce_sum().tolist() == [4.0, 8.0]
    assert output.concat().tolist() == [1.0, 2.0, 3.0, 6.0]
    assert output.stack().tolist() == [[1.0, 2.0], [3.0, 6.0]]


def test_the_mean_of_uneven_microbatches_is_that_of_the_samples():
    assert StepOutput([torch.tensor(1.0), torch.tensor(4.0)], sizes=(2, 1)).reduce_mean() == 2.0
    assert StepOutput([torch.tensor(1), torch.tensor(4)]).reduce_sum() == 5


@smp.step
def everything(model, data, word):
    logits = model(data)
    return {"logits": logits, "pair": (logits.sum(), word)}, len(data)


def nested(parameters):
    model, _ = begin(parameters)
    data = batches()[0][0]
    with torch.no_grad():
        found, lengths = everything(model, data, "a")
    assert lengths == [2, 2, 2, 2]
    assert found["pair"][1] == ["a"] * 4
    assert isinstance(found["pair"][0], StepOutput)
    torch.testing.assert_close(found["logits"].concat(), net()(data))
    assert not found["logits"].outputs[0].requires_grad


def test_containers_of_results_keep_their_structure():
    on_ranks(nested, 2, PP2)


# --- inputs ---------------------------------------------------------------------------------------------------------


@smp.step(non_split_inputs=["scale"], input_split_axes={"turned": 1})
def weighted(model, turned, scale, others, *, flag=None):
    loss = F.cross_entropy(model(turned.T) * scale, others["targets"][0])
    model.backward(loss)
    return turned, scale, flag, loss


def cut_inputs(parameters):
    model, _ = begin(parameters)
    data, targets = batches()[0]
    scale = torch.arange(1.0, CLASSES + 1)
    others = collections.OrderedDict(targets=[targets], name="x")
    turned, given, flag, loss = weighted(model, data.T.contiguous(), scale, others, flag=torch.tensor(3.0))
    assert [list(each.shape) for each in turned.outputs] == [[data.size(1), 2]] * 4
    assert torch.equal(torch.cat(turned.outputs, 1), data.T)
    assert all(torch.equal(each, scale) for each in given.outputs)
    assert flag.outputs == [torch.tensor(3.0)] * 4
    expected = F.cross_entropy(net()(data) * scale, targets)
    torch.testing.assert_close(loss.reduce_mean(), expected.detach())


def test_tensors_are_cut_along_their_axes_unless_they_are_named():
    on_ranks(cut_inputs, 2, PP2)


class Ragged:
    """Cuts itself."""

    def __init__(self, items):
        self.items = items

    def smp_slice(self, num_mb, mb, axis):
        assert axis == 3
        size = len(self.items) // num_mb
        return self.items[mb * size : (mb + 1) * size]


@smp.step(input_split_axes={"ragged": 3})
def with_objects(model, data, ragged, words):
    return model(data).sum(), ragged, words


def slices(parameters):
    model, _ = begin(parameters)
    with torch.no_grad():
        _, ragged, words = with_objects(model, batches()[0][0], Ragged(list("abcdefgh")), ["x"] * BATCH)
    assert ragged == [list("aceg"), list("bdfh")]  # "ab", "cd", "ef" and "gh": a list of two keeps its structure
    assert words == [["x"] * 4] * BATCH


def test_objects_cut_themselves_and_all_others_are_whole():
    on_ranks(slices, 2, PP2)


def test_unknown_names_of_inputs_are_refused():
    with pytest.raises(ConfigError, match="`non_split_inputs` names labels, which `f` has no argument for. It has: mo"):

        @smp.step(non_split_inputs=["labels"])
        def f(model, data):
            pass


def uneven(parameters):
    model, optimizer = begin(parameters)
    data, targets = batches()[0]
    _, loss = train_step(model, data[:7], targets[:7])
    optimizer.step()
    twin = net()
    expected = F.cross_entropy(twin(data[:7]), targets[:7])
    expected.backward()
    adamw(twin.parameters()).step()
    torch.testing.assert_close(loss.reduce_mean(), expected.detach())
    state = model.state_dict()
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_a_batch_need_not_be_divisible_by_the_microbatches():
    on_ranks(uneven, 2, PP2)


def own_samples(parameters):
    model, optimizer = begin(parameters)
    whole = net()
    for data, targets in batches(2):
        mine = data[smp.dp_rank() :: smp.dp_size()], targets[smp.dp_rank() :: smp.dp_size()]
        with torch.no_grad():
            expected = whole(mine[0])
        logits, loss = train_step(model, *mine)
        torch.testing.assert_close(logits.concat(), expected, rtol=1e-4, atol=1e-5)
        optimizer.step()
        optimizer.zero_grad()
        whole.load_state_dict(model.state_dict())
    return model.state_dict()


def test_ranks_that_split_layers_may_read_samples_of_their_own():
    _, weights = plain(steps=2)
    for found in on_ranks(own_samples, 2, TP2):
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


# --- calls ----------------------------------------------------------------------------------------------------------


@smp.step
def either(model, data, targets, trains):
    loss = F.cross_entropy(model(data), targets)
    if trains:
        model.backward(loss)
    return loss


def both(parameters):
    model, optimizer = begin(parameters)
    data, targets = batches()[0]
    before = either(model, data, targets, False).reduce_mean()
    assert not any(parameter.grad is not None for parameter in model.local_parameters())
    either(model, data, targets, True)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        after = either(model, data, targets, False).reduce_mean()
    assert after < before
    with torch.no_grad(), pytest.raises(UnsupportedError, match="`model.backward` was called in a step that runs forw"):
        either(model, data, targets, True)


@pytest.mark.parametrize("layout", ["pp2", "sdp2", "single"])
def test_one_function_may_train_and_evaluate(layout):
    ranks, parameters = LAYOUTS[layout]
    on_ranks(both, ranks, parameters)


@smp.step
def several_losses(model, data, targets):
    logits = model(data)
    model.backward(F.cross_entropy(logits, targets))
    model.backward(logits, torch.full_like(logits, 0.01))
    return logits


def gradients_of_several(parameters):
    model, _ = begin(parameters, average_grads_across_microbatches=False)
    data, targets = batches()[0]
    several_losses(model, data, targets)
    twin = net()
    for part, target in zip(data.chunk(4), targets.chunk(4), strict=True):
        logits = twin(part)
        (F.cross_entropy(logits, target) + (logits * 0.01).sum()).backward()
    own = dict(twin.named_parameters())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, own[name].grad)


def test_losses_of_a_microbatch_add_up_and_those_of_microbatches_may():
    on_ranks(gradients_of_several, 2, PP2)


COUNT = collections.Counter()


@smp.step
def reading(model, data, targets):
    COUNT["calls"] += 1
    logits = model(data)
    loss = F.cross_entropy(logits, targets)
    if loss.item() > 0:  # a value of another stage
        model.backward(loss)
    return loss.item()


def values(parameters):
    model, optimizer = begin(parameters)
    found = [reading(model, *batch) for batch in batches(2)]
    optimizer.step()
    assert COUNT["calls"] == 8
    assert all(isinstance(loss, float) for step in found for loss in step)
    return found


def test_code_of_a_step_runs_once_per_microbatch_and_reads_values():
    first, second = on_ranks(values, 2, PP2)
    assert first == second


class Trainer:
    def __init__(self, model):
        self.model = model

    @smp.step
    def forward_backward(self, data, targets):
        loss = F.cross_entropy(self.model(data), targets)
        self.model.backward(loss)
        return loss


def methods(parameters):
    model, _ = begin(parameters)
    data, targets = batches()[0]
    loss = Trainer(model).forward_backward(data, targets).reduce_mean()
    torch.testing.assert_close(loss, F.cross_entropy(net()(data), targets).detach())


def test_a_method_may_be_a_step_that_finds_the_model_in_its_object():
    on_ranks(methods, 2, PP2)


def outside(parameters):
    model, _ = begin(parameters)
    data, targets = batches()[0]
    with pytest.raises(UnsupportedError, match="called with gradients outside of a function with `@smp.step`"):
        model(data)
    with torch.no_grad():
        torch.testing.assert_close(model(data), net()(data))
    train_step(model, data, targets)
    with torch.no_grad():
        torch.testing.assert_close(model(data), net()(data))
    with pytest.raises(UnsupportedError, match="outside of a function with `@smp.step`. Call it inside"):
        model.backward(torch.ones((), requires_grad=True))


@pytest.mark.parametrize("layout", ["pp2", "sdp2"])
def test_calls_outside_of_steps_are_evaluations(layout):
    ranks, parameters = LAYOUTS[layout]
    on_ranks(outside, ranks, parameters)


def accumulated(parameters, passes):
    model, optimizer = begin(parameters, backward_passes_per_step=passes)
    for number, batch in enumerate(batches(4)):
        train_step(model, *mine(batch))
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("layout", ["pp2", "sdp2", "replicas2", "pp2 x replicas2"])
def test_gradients_of_several_steps_add_up(layout):
    ranks, parameters = LAYOUTS[layout]
    twin = net()
    optimizer = adamw(twin.parameters())
    for number, (data, targets) in enumerate(batches(4)):
        F.cross_entropy(twin(data), targets).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    for passes in (1, 2):
        for found in on_ranks(accumulated, ranks, parameters, passes):
            for name, value in twin.state_dict().items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def two_models(parameters):
    smp.init(parameters)
    first, second = (smp.DistributedModel(net()) for _ in range(2))
    optimizers = [smp.DistributedOptimizer(adamw(each.parameters())) for each in (first, second)]
    data, targets = batches()[0]
    losses = [train_step(model, data, targets)[1].reduce_mean() for model in (first, second)]
    assert losses[0] == losses[1]
    for optimizer in optimizers:
        optimizer.step()
    with pytest.raises(SMPError, match="runs one model, but 2 are meant"):
        everything({"both": [first, second]}, data, "")
    return first.state_dict(), second.state_dict()


def test_a_script_may_have_several_models():
    for first, second in on_ranks(two_models, 2, PP2):
        assert all(torch.equal(first[name], second[name]) for name in first)


def dropout(parameters):
    model, optimizer = begin(parameters, Net(0.5))
    losses = [train_step(model, *batch)[1].reduce_mean() for batch in batches(2)]
    optimizer.step()
    return losses


def test_dropout_draws_the_same_under_any_number_of_stages():
    torch.manual_seed(0)
    two = on_ranks(dropout, 2, PP2)
    torch.manual_seed(0)
    one = on_ranks(dropout, 1, PP2 | {"partitions": 1})
    assert two[0] == two[1] == one[0]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, WIDTH)
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.blocks(self.words(ids)))


def tied(parameters):
    torch.manual_seed(0)
    model, optimizer = begin(parameters, Tied())
    ids = torch.arange(8)
    for _ in range(2):
        train_step(model, ids, ids)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("layout", ["pp2", "sdp2", "tp2"])
def test_tied_weights_stay_tied(layout):
    ranks, parameters = LAYOUTS[layout]
    torch.manual_seed(0)
    twin = Tied()
    optimizer = adamw(twin.parameters())
    for _ in range(2):
        F.cross_entropy(twin(torch.arange(8)), torch.arange(8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in on_ranks(tied, ranks, parameters):
        assert list(found) == list(twin.state_dict())
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@smp.step
def traced(model, data):
    if smp.is_tracing():
        raise LookupError("dry")
    return model(data).sum()


def traces(parameters):
    model, _ = begin(parameters)
    with pytest.raises(LookupError, match="dry"):
        traced(model, batches()[0][0])
    assert not smp.is_tracing()
    train_step(model, *batches()[0])
    assert smp.is_initialized()


def test_code_can_ask_whether_it_runs_dry():
    on_ranks(traces, 2, PP2)


def saved_alone(parameters):
    model, optimizer = begin(parameters)
    train_step(model, *batches()[0])
    optimizer.step()
    if smp.rank() == 0:
        with pytest.raises(SMPError, match="smp.save_checkpoint"):
            torch.save(model.module.state_dict(), "/dev/null")
    smp.barrier()


def told(parameters):
    import contextlib
    import io

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        model, _ = begin(parameters)
        train_step(model, *batches()[0])
    return text.getvalue()


def test_saving_the_module_of_one_rank_names_the_remedy_before_and_after():
    on_ranks(saved_alone, 2, PP2)
    first, second = on_ranks(told, 2, PP2)
    assert "To save all of them call, on all ranks, `smp.save_checkpoint(path, tag, partial=False)`" in first
    assert first.index("To save all of them") < first.index("A training step sees 8 samples")
    assert not second


@smp.step
def with_everything(model, optimizer, data, targets, args):
    assert isinstance(optimizer, smp.DistributedOptimizer)
    logits = model(data)
    loss = F.cross_entropy(logits, targets, label_smoothing=args.smoothing)
    model.backward(loss)
    return loss


def passes(parameters):
    model, optimizer = begin(parameters)
    args = argparse.Namespace(smoothing=0.1, more=[1, 2])
    data, targets = batches()[0]
    model.to("cpu")
    loss = with_everything(model, optimizer, data, targets, args).reduce_mean()
    torch.testing.assert_close(loss, F.cross_entropy(net()(data), targets, label_smoothing=0.1).detach())
    assert args.more == [1, 2]
    optimizer.step()
    with_everything(model, optimizer, data, targets, args)
    assert "DistributedModel" in repr(model)


def test_optimizers_and_options_may_be_arguments():
    on_ranks(passes, 2, PP2)


def fewer_batches(parameters):
    model, optimizer = begin(parameters)
    with model.join():
        for batch in batches(3 - smp.rdp_rank()):
            train_step(model, *batch)
            optimizer.step()
        smp.barrier()


@pytest.mark.parametrize("layout", ["replicas2", "sdp2"])
def test_a_replica_with_fewer_batches_is_an_error(layout):
    ranks, parameters = LAYOUTS[layout]
    with pytest.raises(RuntimeError, match="ApartError|PeerFailedError"):
        on_ranks(fewer_batches, ranks, parameters, timeout=60.0)


# --- a teacher that follows its student ------------------------------------------------------------------------------


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = net()
        self.teacher = copy.deepcopy(self.student).requires_grad_(requires_grad=False)

    @torch.no_grad()
    def follow(self):
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.lerp_(new, 0.2)

    def loss(self, inputs, targets, number):
        if number > 1:
            self.follow()
        logits = self.student(inputs)
        return F.cross_entropy(logits, targets) + (logits - self.teacher(inputs)).square().mean()

    forward = loss


@smp.step
def distilling_step(model, inputs, targets, number):
    model.backward(model(inputs, targets, number))


def distilled(parameters, between=""):
    smp.init(parameters)
    model = smp.DistributedModel(Distilled())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.module.student.parameters(), lr=0.1, momentum=0.9))
    for number, batch in enumerate(batches()):
        optimizer.zero_grad()
        distilling_step(model, *(mine(batch) if between else batch), 0 if between else number)
        optimizer.step()
        if between == "whole":
            model.cpu()
        if between:
            model.module.follow()
    return model.state_dict()


@pytest.mark.parametrize("layout", ["pp2", "tp2"])
def test_a_teacher_begins_to_follow_its_student_in_a_later_step(layout):
    world_size, parameters = {"pp2": (2, PP2), "tp2": (2, {**TP2, "prescaled_batch": True})}[layout]
    expected, parts = Distilled(), parameters["microbatches"]
    optimizer = torch.optim.SGD(expected.student.parameters(), lr=0.1, momentum=0.9)
    for number, batch in enumerate(batches()):
        optimizer.zero_grad()
        for inputs, targets in zip(*(each.chunk(parts) for each in batch), strict=True):
            (expected.loss(inputs, targets, number) / parts).backward()
        optimizer.step()
    for found in on_ranks(distilled, world_size, parameters):
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["pp2", "sdp2"])
def test_weights_that_are_whole_on_every_rank_may_be_changed_between_steps(layout):
    world_size, parameters = LAYOUTS[layout]
    parameters = {**parameters, **({"sdp_param_persistence_threshold": 0} if layout == "sdp2" else {})}
    with pytest.raises(RuntimeError, match=r"or after `model\.cpu\(\)` on all ranks"):
        on_ranks(distilled, world_size, parameters, "in parts")
    expected = Distilled()
    optimizer = torch.optim.SGD(expected.student.parameters(), lr=0.1, momentum=0.9)
    for batch in batches():
        optimizer.zero_grad()
        expected.loss(*batch, 0).backward()
        optimizer.step()
        expected.follow()
    for found in on_ranks(distilled, world_size, parameters, "whole"):
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
