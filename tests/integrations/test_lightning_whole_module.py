"""When a run ends, the module is an ordinary one again on every rank that asks for it, with the bits of one process."""

import copy
import io

import pytest
import torch
from lightning_toy import FEATURES, metrics_of, on_ranks, quiet, toy_loader, toy_module, toy_trainer
from torch import nn

MICROBATCHES, BATCH = 4, 8
INPUT = torch.linspace(-1, 1, 4 * FEATURES).reshape(4, FEATURES)


def smp(degree, **options):
    return {"pipeline_parallel_degree": degree, "microbatches": MICROBATCHES, **options}


class Block(nn.Module):
    """Has a state besides its weights."""

    def __init__(self, width):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.register_buffer("largest", None)
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        self.largest = x.detach().abs().max(dim=0).values
        return x + self.norm(self.linear(x)).tanh()

    def get_extra_state(self):
        return {"num_calls": self.num_calls}

    def set_extra_state(self, state):
        self.num_calls = state["num_calls"]


def deep_module():
    module = toy_module()
    module.net = nn.Sequential(*(Block(FEATURES) for _ in range(5)), nn.Linear(FEATURES, 4))
    return module


def fit(folder, smp_options):
    """One epoch; in one process with the microbatches as batches."""
    module = deep_module()
    before = list(module.parameters())
    plain = {"accumulate_grad_batches": MICROBATCHES} if smp_options is None else {}
    batch_size = BATCH // MICROBATCHES if smp_options is None else BATCH
    trainer = toy_trainer(folder, smp=smp_options, max_epochs=1, **plain)
    trainer.fit(module, toy_loader(shuffle=False, batch_size=batch_size))
    same = all(a is b for a, b in zip(before, module.parameters(), strict=True))
    return module, trainer, same


def use(folder, smp_options):
    module, trainer, same_parameters = fit(folder, smp_options)
    stream = io.BytesIO()
    torch.save(module.state_dict(), stream)
    module.eval()
    results = module.net(INPUT), copy.deepcopy(module).net(INPUT)
    whole = io.BytesIO()
    torch.save(module.net, whole)
    whole.seek(0)
    results = (*results, torch.load(whole, weights_only=False)(INPUT))
    left = [name for name, part in module.named_modules() if "forward" in vars(part)]
    kinds = {type(tensor) for tensor in (*module.parameters(), *module.buffers())}
    assert same_parameters
    assert not left
    assert kinds == {nn.Parameter, torch.Tensor}
    return results, module.state_dict()


@pytest.mark.parametrize("pp", [2, 4])
def test_the_module_is_that_of_one_process_on_every_rank(pp, tmp_path):
    with quiet():
        expected_outputs, expected = use(tmp_path, None)
    for outputs, weights in on_ranks(use, pp, tmp_path, smp(pp)):
        assert list(weights) == list(expected)
        for name, value in expected.items():
            if name.endswith("_extra_state"):
                assert weights[name]["num_calls"] > 0
            else:
                assert torch.equal(weights[name], value), name
        for mine, plain in zip(outputs, expected_outputs, strict=True):
            assert torch.equal(mine, plain)


def as_channels_last(folder):
    module = toy_module(loss=lambda self, batch: self.net(batch[0].view(-1, 2, 2, 2)).square().mean())
    module.net = nn.Sequential(*(nn.Conv2d(2, 2, 1) for _ in range(4))).to(memory_format=torch.channels_last)
    before = [parameter.stride() for parameter in module.parameters()]
    toy_trainer(folder, smp=smp(2), max_epochs=1).fit(module, toy_loader())
    return before == [parameter.stride() for parameter in module.parameters()]


def test_memory_layouts_come_back(tmp_path):
    assert on_ranks(as_channels_last, 2, tmp_path) == [True] * 2


def attempts(folder, where):
    module, trainer, _ = fit(folder, smp(2, restore_module=where))
    trainer.save_checkpoint(folder / "end.ckpt")  # collective: works wherever the values are
    module.eval()
    tries = {
        "state_dict": module.state_dict,
        "call": lambda: module.net(INPUT),
        "part": module.net[0].state_dict,
        "other part": module.net[5].state_dict,
        "deepcopy": lambda: copy.deepcopy(module),
        "save": lambda: torch.save(module.net, io.BytesIO()),
        "norm": lambda: sum(parameter.norm() for parameter in module.parameters()),
    }
    errors = {}
    for name, attempt in tries.items():
        try:
            attempt()
        except RuntimeError as error:
            errors[name] = str(error)
    return errors


@pytest.mark.parametrize(("where", "partial"), [("rank_zero", [1]), ("none", [0, 1])])
def test_a_rank_that_did_not_ask_refuses_by_name(where, partial, tmp_path):
    with quiet():
        expected = fit(tmp_path, None)[0].state_dict()
    for rank, errors in enumerate(on_ranks(attempts, 2, tmp_path, where)):
        if rank not in partial:
            assert not errors
            continue
        other = "other part" if rank == 1 else "part"
        assert set(errors) == {"state_dict", "call", "deepcopy", "save", "norm", other}
        for text in errors.values():
            assert "which are on stage" in text
            assert "restore_module" in text
    found = torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"]
    for name, value in expected.items():
        assert name.endswith("_extra_state") or torch.equal(found[name], value), name


def life(folder, first, later, new_trainers):
    module = toy_module()
    module.net.insert(3, nn.Linear(16, 16))
    options = {"max_epochs": 2, "enable_checkpointing": True}
    results = []

    def trainer_for(smp_options, **more):
        return toy_trainer(folder, smp=smp_options, **{**options, **more})

    trainer = trainer_for(first)
    trainer.fit(module, toy_loader(), toy_loader(shuffle=False))
    results.append(metrics_of(trainer))
    best = trainer.checkpoint_callback.best_model_path
    for verb in ("validate", "test"):
        trainer = trainer_for(later) if new_trainers else trainer
        path = best if verb == "test" else None
        results += getattr(trainer, verb)(module, toy_loader(shuffle=False), verbose=False, ckpt_path=path)
    trainer = trainer_for(first) if new_trainers else trainer
    predicted = torch.cat(trainer.predict(module, toy_loader(shuffle=False)))
    for epochs in (3, 4):
        if new_trainers:
            trainer = trainer_for(later, max_epochs=epochs)
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, toy_loader(shuffle=False), toy_loader(shuffle=False))
        results.append(metrics_of(trainer))
    try:
        return results, predicted, module.net(INPUT), module.state_dict()
    except RuntimeError:  # a rank that did not ask for the module
        return results, predicted, None, None


SPREAD = {"restore_module": "none"}
LIVES = {
    "one trainer": (smp(2), smp(2), False),
    "one trainer that leaves the module on rank zero": (smp(2, restore_module="rank_zero"),) * 2 + (False,),
    "new trainers": (smp(2), smp(2), True),
    "new trainers after one that leaves the module spread": (smp(2, **SPREAD), smp(2), True),
    "new trainers after one that leaves the module on rank zero": (smp(2, restore_module="rank_zero"), smp(2), True),
}


@pytest.mark.dear
@pytest.mark.parametrize("name", LIVES)
def test_runs_follow_each_other(name, tmp_path):
    first, later, new = LIVES[name]
    with quiet():
        results, predicted, outputs, weights = life(tmp_path / "one", None, None, new)
    for rank, found in enumerate(on_ranks(life, 2, tmp_path / "smp", first, later, new)):
        for mine, plain in zip(found[0], results, strict=True):
            assert mine == pytest.approx(plain, rel=1e-4)
        torch.testing.assert_close(found[1], predicted, rtol=1e-4, atol=1e-5)
        if rank == 0 or later.get("restore_module", "all") == "all":
            torch.testing.assert_close(found[2], outputs, rtol=1e-4, atol=1e-5)
            for key, value in weights.items():
                torch.testing.assert_close(found[3][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.one_in(2)
def test_degrees_may_change_between_runs(tmp_path):
    with quiet():
        [fitted, *_], *_ = life(tmp_path / "one", None, None, True)
    ranks = on_ranks(life, 4, tmp_path / "smp", smp(4, **SPREAD), smp(2), True)  # one replica, then two
    for results, _, outputs, weights in ranks:
        assert results[0] == pytest.approx(fitted, rel=1e-4)
        assert torch.equal(outputs, ranks[0][2])
        assert all(torch.equal(value, ranks[0][3][key]) for key, value in weights.items())


class OnOneRankError(Exception):
    pass


def fail_once(self, batch, batch_idx):
    if batch_idx == 1 and not self.failed:
        self.failed = True
        raise OnOneRankError("on purpose")
    return self.loss(batch)


def fail_and_go_on(folder, options):
    """Every rank fails in the same step, the script catches that and begins again."""
    module = toy_module(training_step=fail_once, failed=False)
    trainer = toy_trainer(folder, smp=options, max_epochs=1)
    with pytest.raises(OnOneRankError):
        trainer.fit(module, toy_loader(shuffle=False))
    try:
        module.state_dict()
    except RuntimeError as error:
        text = str(error)
    toy_trainer(folder, smp=options, max_epochs=1).fit(module, toy_loader(shuffle=False))
    return text, module.state_dict()


@pytest.mark.parametrize(
    ("ranks", "options", "reason"),
    [
        (2, smp(2), "which are on stage"),
        (4, {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2}, "that is spread over ranks"),
    ],
)
def test_a_failed_run_leaves_parts_that_the_next_run_puts_together(ranks, options, reason, tmp_path):
    for text, weights in on_ranks(fail_and_go_on, ranks, tmp_path, options):
        assert reason in text
        assert all(value.isfinite().all() for value in weights.values())


def exchange_the_head(folder, smp_options):
    module = toy_module()
    trainer = toy_trainer(folder, smp=smp_options, max_epochs=1)
    trainer.fit(module, toy_loader(shuffle=False))
    torch.manual_seed(3)
    module.net[6] = nn.Linear(16, 4)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, toy_loader(shuffle=False))
    return module.state_dict()


def test_modules_may_be_exchanged_between_runs(tmp_path):
    with quiet():
        expected = exchange_the_head(tmp_path, None)
    for found in on_ranks(exchange_the_head, 2, tmp_path, smp(2)):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
