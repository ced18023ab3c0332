"""Parts of a module that the user has compiled, under all layouts."""

import pytest
import torch
from lightning_toy import on_ranks, quiet, shared_loader, toy_loader, toy_module, toy_trainer
from torch import nn

LAYOUTS = {
    "pp2": {"pipeline_parallel_degree": 2, "microbatches": 2},
    "sdp2": {"sharded_data_parallel_degree": 2},
    "sdp2-recomputed": {"sharded_data_parallel_degree": 2, "activation_checkpointing": "all"},
}


class Block(nn.Module):
    def __init__(self, backend=None):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        if backend is not None:
            self.linear = torch.compile(self.linear, backend=backend)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def train(folder, smp, is_inside, backend):
    module = toy_module()
    torch.manual_seed(0)
    if is_inside:
        blocks = [Block(backend) for _ in range(3)]
    else:
        blocks = [torch.compile(Block(), backend=backend) for _ in range(3)]
    module.net = nn.Sequential(*blocks, nn.Linear(8, 4))
    trainer = toy_trainer(folder, smp=smp, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, shared_loader(trainer, smp))
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("is_inside", [False, True], ids=["units", "inside of units"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_that_the_user_has_compiled_train_as_in_one_process(tmp_path, layout, is_inside, backend):
    (expected,) = on_ranks(train, 1, tmp_path, None, is_inside, backend)
    for found in on_ranks(train, 2, tmp_path, LAYOUTS[layout], is_inside, backend):
        torch.testing.assert_close(found, expected)


def train_in_place(folder, smp):
    module = toy_module()
    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    if smp is not None:  # whatever compiles a module in place: its units, a part of one, or all of it
        module.compile(backend="eager")
        blocks[0].compile(backend="eager")
        blocks[1].linear.compile(backend="eager")
    module.net = nn.Sequential(*blocks, nn.Linear(8, 4))
    trainer = toy_trainer(folder, smp=smp, max_epochs=1, use_distributed_sampler=False)
    found = []
    if smp is None:
        trainer.fit(module, shared_loader(trainer, smp))
    else:
        with pytest.warns(UserWarning, match="compiled in place") as found:
            trainer.fit(module, shared_loader(trainer, smp))
        assert blocks[0]._compiled_call_impl is not None
    told = [each for each in found if "compiled in place" in str(each.message)]
    return {name: value.clone() for name, value in module.state_dict().items()}, len(told)


def test_modules_that_are_compiled_in_place_run_uncompiled_with_a_warning(tmp_path):
    with quiet():
        ((expected, _),) = on_ranks(train_in_place, 1, tmp_path, None)
    for layout in ("pp2", "sdp2"):
        for found, times in on_ranks(train_in_place, 2, tmp_path, LAYOUTS[layout]):
            torch.testing.assert_close(found, expected, msg=lambda text, layout=layout: f"{layout}: {text}")
            assert times == 1


def smoothed(logits, targets):
    return nn.functional.cross_entropy(logits, targets, label_smoothing=0.1) + 1e-2 * logits.square().mean()


class ScaledHead(nn.Module):
    """A method of it that is compiled calls units."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 4)

    def both(self, x):
        for block in self.body:
            x = block(x)
        return self.head(x) * x.std(1, keepdim=True)

    def forward(self, x):
        return self.both(x)


def train_with_functions(folder, smp, fullgraph, is_manual):
    """Functions and methods that are compiled, called by the code above the units."""
    loss_of = torch.compile(smoothed, backend="aot_eager", fullgraph=fullgraph)

    def training_step(self, batch, batch_idx):
        loss = loss_of(self.net(batch[0]), batch[1])
        if is_manual:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", loss_of(self.net(batch[0]), batch[1]), batch_size=len(batch[0]))

    module = toy_module(training_step=training_step, validation_step=validation_step)
    module.automatic_optimization = not is_manual
    torch.manual_seed(0)
    module.net = ScaledHead()
    module.net.both = torch.compile(module.net.both, backend="aot_eager")
    module.net.body[0] = torch.compile(module.net.body[0], backend="aot_eager")
    trainer = toy_trainer(folder, smp=smp, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, shared_loader(trainer, smp), toy_loader(shuffle=False))
    state = {name: value.clone() for name, value in module.state_dict().items()}
    return state, trainer.callback_metrics["val_loss"].item()


@pytest.mark.dear
@pytest.mark.parametrize("is_manual", [False, True])
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("layout", ["pp2", "sdp2"])
def test_functions_above_the_units_that_the_user_has_compiled(tmp_path, layout, fullgraph, is_manual):
    with quiet():
        ((expected, loss),) = on_ranks(train_with_functions, 1, tmp_path, None, fullgraph, is_manual)
    for found, value in on_ranks(train_with_functions, 2, tmp_path, LAYOUTS[layout], fullgraph, is_manual):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert value == pytest.approx(loss, rel=1e-5)
