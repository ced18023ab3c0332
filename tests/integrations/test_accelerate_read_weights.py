"""Scripts that read weights between steps, as they are published: on the main process alone, or on all ranks."""

import copy

import pytest
import torch
from accelerate_checks import adamw, assert_same, batches, fresh_accelerator, mine, on_ranks, toy
from saved_models import VOCABULARY, gpt2
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

PP1, PP2 = {"pipeline_parallel_degree": 1}, {"pipeline_parallel_degree": 2, "microbatches": 2}
SDP2 = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}
LAYOUTS = {"pp2": (2, PP2), "sdp2": (2, {**PP1, **SDP2}), "pp2 x replicas": (4, PP2), "replicas": (2, PP1)}
TOKENS = torch.randint(VOCABULARY, (12, 8), generator=torch.Generator().manual_seed(0))


class Hand:
    """An average as scripts write it."""

    def __init__(self, net):
        self.shadow = {name: each.detach().clone() for name, each in net.named_parameters()}

    def update(self, net):
        with torch.no_grad():
            for name, each in net.named_parameters():
                self.shadow[name] = 0.5 * self.shadow[name] + 0.5 * each


def without_dropout():
    net = gpt2()
    for part in net.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    return net


def average_of(kind, net):
    """The average, what updates it, and what returns its weights."""
    if kind == "hand":
        hand = Hand(net)
        return lambda: hand.update(net), lambda: list(hand.shadow.values())
    averaged = AveragedModel(copy.deepcopy(net), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    return lambda: averaged.update_parameters(net), lambda: list(averaged.module.parameters())


def train(smp, kind, is_main_alone):
    accelerator = fresh_accelerator(smp)
    net = without_dropout()
    update, weights = average_of(kind, net)
    share = 4 // accelerator.num_processes
    model, optimizer, loader = accelerator.prepare(net, adamw(net), DataLoader(TOKENS, batch_size=share))
    for batch in loader:
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.is_main_process or not is_main_alone:
            update()
    found = [each.detach().clone() for each in weights()]
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return found, {name: value.clone() for name, value in state.items()}


def plainly(kind):
    net = without_dropout()
    update, weights = average_of(kind, net)
    optimizer = adamw(net)
    for batch in TOKENS.split(4):
        net(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        update()
    return list(weights()), net.state_dict()


@pytest.mark.parametrize("is_main_alone", [True, False])
@pytest.mark.parametrize("kind", ["hand", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_averages_of_weights_are_those_of_one_process(layout, kind, is_main_alone):
    world_size, smp = LAYOUTS[layout]
    expected, state = plainly(kind)
    for rank, (found, trained) in enumerate(on_ranks(train, world_size, smp, kind, is_main_alone)):
        assert_same(trained, state, rtol=1e-5, atol=1e-6)
        if rank == 0 or not is_main_alone:
            torch.testing.assert_close(found, [each.detach() for each in expected], rtol=1e-5, atol=1e-6)


def change(parameters):
    for each in parameters:
        each.data.mul_(0.5)


def read(parameters):
    sum(each.detach().sum() for each in parameters)


def trained_beside(use, on_main):
    """Train, and let either the main process or the other one use the parameters alone."""
    accelerator = fresh_accelerator(PP2)
    net = without_dropout()
    model, optimizer = accelerator.prepare(net, adamw(net))
    for batch in TOKENS.split(4):
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.is_main_process == on_main:
            use(net.parameters())


def test_weights_that_the_main_process_changes_alone_are_refused():
    with pytest.raises(RuntimeError, match=r"The script has changed `.*accelerator\.smp\.with_weights"):
        on_ranks(trained_beside, 2, change, True)


def test_weights_that_another_process_reads_alone_are_refused_with_the_remedy():
    with pytest.raises(RuntimeError, match=r"UnsupportedError: .* needs the values .*smp\.with_weights"):
        on_ranks(trained_beside, 2, read, False)


class Distilled(torch.nn.Module):
    """A student, and a teacher that is equal to it at first."""

    def __init__(self):
        super().__init__()
        self.student = toy("tensor")
        self.teacher = copy.deepcopy(self.student).requires_grad_(requires_grad=False)

    def forward(self, inputs, targets):
        return self.student(inputs, targets) + (self.student(inputs) - self.teacher(inputs)).square().mean()

    @torch.no_grad()
    def follow(self):
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.mul_(0.8).add_(new, alpha=0.2)


def distilled(smp):
    accelerator = fresh_accelerator(smp)
    model = Distilled()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.student.parameters(), lr=0.1))
    for number, batch in enumerate(batches()):
        accelerator.backward(model(**(batch if smp is None else mine(accelerator, batch))))
        optimizer.step()
        optimizer.zero_grad()
        if number > 2:
            model.follow() if smp is None else accelerator.smp.with_weights(model.follow)
    state = accelerator.get_state_dict(model)
    return {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_teacher_begins_to_follow_its_student_between_steps(layout):
    world_size, smp = LAYOUTS[layout]
    (expected,) = on_ranks(distilled, 1, None)
    assert any(not torch.equal(expected[n], toy().state_dict()[n[8:]]) for n in expected if n.startswith("teacher"))
    assert_same(on_ranks(distilled, world_size, smp)[0], expected, rtol=1e-5, atol=1e-6)
