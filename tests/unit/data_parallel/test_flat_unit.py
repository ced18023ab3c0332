"""Units whose parameters are in flat buffers, of which each rank keeps a shard."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.functional import relu
from torch.utils.checkpoint import checkpoint

from smp_strategy.data_parallel.flat_unit import FlatUnit, ShardPolicy
from smp_strategy.data_parallel.parameter_pieces import RestingGuard
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.guarded_tensors import guard_of
from tests.pieces import pieces_shown
from tests.unit.data_parallel.world import World

CPU = torch.device("cpu")


class Block(nn.Module):
    """Everything that parameters can be: frozen, tied, permuted, small, empty, of two dtypes, unused."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 40)
        self.outer = nn.Linear(40, 24, bias=False)
        self.tied = nn.Linear(24, 40, bias=False)
        self.tied.weight = self.inner.weight
        self.permuted = nn.Parameter(0.1 * torch.randn(7, 24).t())
        self.back = nn.Parameter(0.1 * torch.randn(7, 24))
        self.low = nn.Parameter(torch.randn(24, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.randn(24), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.outer(relu(self.inner(x)) + self.tied(x * self.frozen))
        return self.scale * (x @ self.permuted) @ self.back + x * self.low


def block(seed: int = 0) -> Block:
    torch.manual_seed(seed)
    return Block()


def plain_block() -> Block:
    """The same in one process, where gradients of half precision are added up in float32, too."""
    module = block()
    module.low.grad_dtype = torch.float32
    return module


@contextmanager
def in_one_dtype(module: Block) -> Iterator[None]:
    """For an optimizer: the gradient in half precision, too."""
    gradient, module.low.grad = module.low.grad, None
    module.low.grad_dtype = torch.bfloat16
    module.low.grad = gradient.bfloat16()
    yield
    module.low.grad = None
    module.low.grad_dtype = torch.float32


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(3, 24, generator=torch.Generator().manual_seed(100 * step + rank))


class Ranks:
    """The same block on several ranks, in one process."""

    def __init__(self, size: int, make: Callable[[], nn.Module] = block, persistence_threshold: int = 0) -> None:
        self.blocks = [make() for _ in range(size)]
        self.units = [
            FlatUnit(
                module.named_parameters(remove_duplicate=False),
                member,
                CPU,
                keeping=ShardPolicy(persistence_threshold=persistence_threshold),
            )
            for module, member in zip(self.blocks, World(size).members, strict=True)
        ]

    def gather(self) -> None:
        for unit in self.units:
            unit.gather()
        for unit in self.units:
            unit.wait()

    def free(self) -> None:
        for unit in self.units:
            unit.free()

    def reduce(self, factor: float = 1.0) -> None:
        for unit in self.units:
            unit.reduce(factor)
        for unit in self.units:
            unit.wait_reduced()

    def step(self, optimizers: Iterable[optim.Optimizer]) -> None:
        for unit, optimizer in zip(self.units, optimizers, strict=True):
            with pieces_shown(unit):
                optimizer.step()
            unit.begin_gradients()

    def train(self, step: int) -> None:
        """Forward, free, gather again, backward, and reduce."""
        self.gather()
        losses = [module(batch(rank, step)).square().mean() for rank, module in enumerate(self.blocks)]
        self.free()
        self.gather()
        for loss in losses:
            loss.backward()
        self.free()
        self.reduce()


def test_parameters_keep_identity_names_shapes_and_layout_and_get_their_values_back():
    plain = block()
    module = block()
    before = dict(module.named_parameters())
    FlatUnit(module.named_parameters(), World(1).members[0], CPU)
    assert {name: id(parameter) for name, parameter in module.named_parameters()} == {
        name: id(parameter) for name, parameter in before.items()
    }
    for (_, resting), (_, original) in zip(module.named_parameters(), plain.named_parameters(), strict=True):
        assert (resting.shape, resting.dtype, resting.requires_grad) == (
            original.shape,
            original.dtype,
            original.requires_grad,
        )
    ranks = Ranks(3)
    ranks.gather()
    for gathered in ranks.blocks:
        for (name, found), (_, original) in zip(gathered.named_parameters(), plain.named_parameters(), strict=True):
            assert torch.equal(found, original), name
            assert found.stride() == original.stride(), name


@pytest.mark.parametrize("use", [lambda p: p.sum(), lambda p: torch.linalg.vector_norm(p), lambda p: p[0, 0]])
def test_a_parameter_that_is_not_gathered_has_no_plausible_value(use):
    ranks = Ranks(2)
    with pytest.raises(UnsupportedError, match="needs the values of a parameter that is spread over ranks"):
        use(ranks.blocks[0].inner.weight)
    ranks.gather()
    assert not use(ranks.blocks[0].inner.weight).isnan()
    ranks.free()
    with pytest.raises(UnsupportedError, match="needs the values of a parameter that is spread over ranks"):
        use(ranks.blocks[0].inner.weight)


@pytest.mark.parametrize("threshold", [0, 30, 10**9])
def test_memory_is_what_the_layout_says_and_is_freed_after_each_use(threshold):
    ranks = Ranks(3, persistence_threshold=threshold)
    plain = sum(parameter.nbytes for parameter in block().parameters())
    unit = ranks.units[1]
    for _ in range(2):
        assert unit.held_bytes == unit.layout.resting_bytes
        if not threshold:
            assert all(parameter.untyped_storage().nbytes() <= 8 for parameter in ranks.blocks[1].parameters())
        ranks.gather()
        assert unit.held_bytes == unit.layout.resting_bytes + unit.layout.transient_bytes
        assert {p.untyped_storage().nbytes() for p in ranks.blocks[1].parameters()} == {
            flat.full_bytes for flat in unit.layout.flats
        }
        ranks.free()
    assert unit.layout.resting_bytes < plain / 2 or threshold == 10**9


def plain_gradients(microbatches: int, step: int = 0) -> Block:
    module = plain_block()
    for rank in range(microbatches):
        module(batch(rank, step)).square().mean().backward()
    return module


def assert_same_gradients(ranks: Ranks, expected: nn.Module) -> None:
    for name, parameter in expected.named_parameters():
        pieces = []
        for module, unit in zip(ranks.blocks, ranks.units, strict=True):
            with pieces_shown(unit):
                found = module.get_parameter(name)
                assert found.grad is None or found.grad.shape == found.shape
                pieces.append(found.grad)
        if not parameter.requires_grad:
            assert pieces == [None] * len(pieces)
        else:
            # As optimizers see it: of the parameter's dtype.
            whole = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to(parameter.dtype)
            in_memory = torch.empty_strided(whole.shape, parameter.stride(), dtype=whole.dtype).copy_(whole)
            assert torch.equal(torch.cat(pieces), in_memory.as_strided((whole.numel(),), (1,))), name


@pytest.mark.parametrize("size", [1, 2, 3])
def test_saved_tensors_survive_that_memory_is_freed_and_gradients_are_those_of_one_process(size):
    ranks = Ranks(size)
    ranks.train(0)
    assert all(parameter.grad is None for module in ranks.blocks for parameter in module.parameters())
    assert_same_gradients(ranks, plain_gradients(size))


def test_microbatches_are_added_in_the_order_in_which_they_are_reduced():
    ranks = Ranks(2)
    module = plain_block()
    for step in range(3):
        ranks.train(step)
        for rank in range(2):
            module(batch(rank, step)).square().mean().backward()
    assert_same_gradients(ranks, module)


def test_gradients_can_be_collected_several_times_before_they_are_reduced():
    ranks = Ranks(2)
    ranks.gather()
    for step in range(2):
        for rank, (module, unit) in enumerate(zip(ranks.blocks, ranks.units, strict=True)):
            module(batch(rank, step)).square().mean().backward()
            unit.collect()
    ranks.reduce()
    per_rank = []
    for rank in range(2):
        module = plain_block()
        for step in range(2):
            module(batch(rank, step)).square().mean().backward()
        per_rank.append(module)
    for first, second in zip(*(module.parameters() for module in per_rank), strict=True):
        if first.grad is not None:
            first.grad += second.grad
    assert_same_gradients(ranks, per_rank[0])


@pytest.mark.parametrize("factor", [0.25, 0.3])
def test_gradients_are_weighed_before_they_are_added(factor):
    ranks = Ranks(2)
    ranks.gather()
    for rank, (module, unit) in enumerate(zip(ranks.blocks, ranks.units, strict=True)):
        module(batch(rank)).square().mean().backward()
        unit.reduce(factor)
    expected = plain_block()
    for parameter in expected.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient * factor)
    for rank in range(2):
        expected(batch(rank)).square().mean().backward()
    for unit in ranks.units:
        unit.wait_reduced()
    assert_same_gradients(ranks, expected)


def test_activation_checkpoints_find_the_weights_of_the_second_gather():
    ranks = Ranks(2)
    ranks.gather()
    losses = [
        checkpoint(module, batch(rank), use_reentrant=False).square().mean() for rank, module in enumerate(ranks.blocks)
    ]
    ranks.free()
    ranks.gather()
    for loss in losses:
        loss.backward()
    ranks.reduce()
    assert_same_gradients(ranks, plain_gradients(2))


def test_what_a_rank_has_not_used_has_the_gradient_of_the_others():
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.options = nn.ParameterList(torch.ones(40) for _ in range(3))

        def forward(self, rank: int) -> Tensor:
            return self.options[rank].sum()

    ranks = Ranks(2, Choice)
    ranks.gather()
    for rank, module in enumerate(ranks.blocks):
        module(rank).backward()
    ranks.reduce()

    def are_used() -> list[list[bool]]:
        for unit in ranks.units:
            unit.end_gradients()
        return [[option.grad.is_used for option in module.options] for module in ranks.blocks]

    assert are_used() == [[True, False, False], [False, True, False]]
    with pieces_shown(ranks.units[0]):
        assert [option.grad.sum() for option in ranks.blocks[0].options] == [40.0, 32.0, 0.0]
    for module, unit in zip(ranks.blocks, ranks.units, strict=True):
        module.zero_grad()
        unit.begin_gradients()
    ranks.reduce()
    assert are_used() == [[False] * 3] * 2


def test_a_unit_that_is_used_twice_is_gathered_twice_and_reduced_once():
    ranks = Ranks(2)
    losses = []
    hidden = [batch(rank) for rank in range(2)]
    for _ in range(2):
        ranks.gather()
        hidden = [module(x) for module, x in zip(ranks.blocks, hidden, strict=True)]
        ranks.free()
    losses = [x.square().mean() for x in hidden]
    ranks.gather()
    for loss in losses:
        loss.backward()
    ranks.reduce()
    expected = plain_block()
    for rank in range(2):
        expected(expected(batch(rank))).square().mean().backward()
    assert_same_gradients(ranks, expected)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], optim.Optimizer]] = {
    "AdamW": lambda p: optim.AdamW(p, 0.01, foreach=False),
    "foreach AdamW": lambda p: optim.AdamW(p, 0.01, foreach=True),
    "fused AdamW": lambda p: optim.AdamW(p, 0.01, fused=True),
    "SGD with momentum": lambda p: optim.SGD(p, 0.01, momentum=0.9, weight_decay=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, 0.01, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p, 0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("threshold", [0, 100])
def test_an_elementwise_optimizer_takes_the_same_steps_on_pieces(name, threshold):
    ranks = Ranks(3, persistence_threshold=threshold)
    optimizers = []
    for module, unit in zip(ranks.blocks, ranks.units, strict=True):
        with pieces_shown(unit):  # some make their state at once
            optimizers.append(OPTIMIZERS[name](module.parameters()))
    plain = plain_block()
    optimizer = OPTIMIZERS[name](plain.parameters())
    for step in range(5):
        ranks.train(step)
        ranks.step(optimizers)
        optimizer.zero_grad()
        for rank in range(3):
            plain(batch(rank, step)).square().mean().backward()
        plain.unused.grad = torch.zeros_like(plain.unused)  # and not None: another rank could have used it
        plain.empty.grad = torch.zeros_like(plain.empty)
        with in_one_dtype(plain):
            optimizer.step()
    ranks.gather()
    for module in ranks.blocks:
        for (key, found), (_, expected) in zip(module.named_parameters(), plain.named_parameters(), strict=True):
            assert torch.equal(found, expected), key
            assert found.isfinite().all()
    kept = [
        sum(value.numel() for value in state.values() if isinstance(value, Tensor) and value.ndim)
        for state in (optimizers[0].state[ranks.blocks[0].inner.weight], optimizer.state[plain.inner.weight])
    ]
    assert kept[0] < kept[1]


def test_an_optimizer_may_be_made_before_the_unit_is_sharded():
    module = block()
    optimizer = optim.AdamW([{"params": [p for p in module.parameters() if p.ndim > 1]}, {"params": [module.low]}])
    groups = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    unit = FlatUnit(module.named_parameters(), World(1).members[0], CPU)
    unit.gather()
    unit.wait()
    module(batch(0)).square().mean().backward()
    unit.reduce()
    before = module.inner.weight.detach().clone()
    with pieces_shown(unit):
        optimizer.step()
    assert [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups] == groups
    unit.gather()
    unit.wait()
    assert not torch.equal(module.inner.weight, before)


def test_small_parameters_stay_but_are_gathered_anew_after_a_step():
    ranks = Ranks(2, persistence_threshold=10**9)
    ranks.gather()
    ranks.free()
    assert torch.equal(ranks.blocks[0].inner.weight, block().inner.weight)
    for module, unit in zip(ranks.blocks, ranks.units, strict=True):
        with pieces_shown(unit):
            module.inner.weight.data.add_(1.0)
        assert isinstance(guard_of(module.inner.weight), RestingGuard)
    ranks.gather()
    for module in ranks.blocks:
        assert torch.equal(module.inner.weight, block().inner.weight + 1.0)


def test_what_is_done_to_shown_gradients_stays_and_gradients_can_be_let_go_of():
    ranks = Ranks(1)
    ranks.train(0)
    unit, module = ranks.units[0], ranks.blocks[0]
    with pieces_shown(unit):
        module.inner.weight.grad.mul_(2.0)
        module.inner.bias.grad = torch.ones_like(module.inner.bias)
        module.outer.weight.grad = None
        expected = module.inner.weight.grad.clone()
    with pieces_shown(unit):
        assert torch.equal(module.inner.weight.grad, expected)
        assert torch.equal(module.inner.bias.grad, torch.ones(40))
        assert not module.outer.weight.grad.any()
        module.zero_grad()
    assert unit.gradient_shards == []


def test_what_was_gathered_ahead_and_not_used_can_be_freed():
    ranks = Ranks(2)
    for unit in ranks.units:
        unit.gather()
    ranks.free()
    assert [unit.held_bytes for unit in ranks.units] == [unit.layout.resting_bytes for unit in ranks.units]
    ranks.gather()
    assert torch.equal(ranks.blocks[1].inner.weight, block().inner.weight)


def test_parameters_can_be_ordinary_ones_again():
    ranks = Ranks(2)
    for unit in ranks.units:
        unit.gather()
    for unit in ranks.units:
        unit.restore()
    for (name, found), (_, original) in zip(
        ranks.blocks[1].named_parameters(), block().named_parameters(), strict=True
    ):
        assert torch.equal(found, original), name
        assert found.stride() == original.stride(), name
        assert found.untyped_storage().nbytes() == found.nbytes


def test_a_change_of_a_parameter_by_somebody_else_is_noticed_by_autograd():
    ranks = Ranks(1)
    ranks.gather()
    loss = ranks.blocks[0](batch(0)).square().mean()
    with torch.no_grad():
        ranks.blocks[0].outer.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_run_may_begin_in_inference_mode():
    modules = [block(), block()]
    with torch.inference_mode():
        ranks = Ranks(2, lambda: modules.pop())
        ranks.gather()
        assert torch.equal(ranks.blocks[0](batch(0)), block()(batch(0)))
        ranks.free()
    ranks.train(0)
    assert_same_gradients(ranks, plain_gradients(2))


@pytest.fixture
def uninitialised_memory_is_nan():
    torch.use_deterministic_algorithms(True)  # fills it
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("uninitialised_memory_is_nan")
def test_padding_is_zero_so_that_norms_can_be_taken_of_shards():
    ranks = Ranks(2)
    ranks.train(0)
    shards = [shard for unit in ranks.units for shard in unit.gradient_shards]
    gradients = [p.grad for p in plain_gradients(2).parameters() if p.grad is not None]
    assert sum(shard.numel() for shard in shards) > sum(gradient.numel() for gradient in gradients)
    squares = sum(shard.double().square().sum() for shard in shards)
    torch.testing.assert_close(squares, sum(gradient.double().square().sum() for gradient in gradients))


def test_a_parameter_that_is_unfrozen_in_a_step_is_refused_by_name():
    ranks = Ranks(1)
    ranks.gather()
    ranks.blocks[0].frozen.requires_grad_()
    ranks.blocks[0](batch(0)).square().mean().backward()
    with pytest.raises(UnsupportedError, match="`frozen`, .* was frozen when the step began"):
        ranks.units[0].collect()


def test_sparse_gradients_are_refused():
    ranks = Ranks(1, lambda: nn.Embedding(10, 4, sparse=True))
    ranks.gather()
    ranks.blocks[0](torch.tensor([1])).square().mean().backward()
    with pytest.raises(UnsupportedError, match="gradient of `weight` is sparse"):
        ranks.units[0].collect()


def test_gaps_between_elements_are_closed():
    def make() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(torch.arange(60.0).reshape(6, 10)[:, :7])
        return module

    ranks = Ranks(2, make)
    ranks.gather()
    found = ranks.blocks[0].weight
    assert torch.equal(found, torch.arange(60.0).reshape(6, 10)[:, :7])
    assert found.stride() == (7, 1)


def test_copies_of_a_gathered_module_are_independent():
    ranks = Ranks(2)
    ranks.gather()
    twin = copy.deepcopy(ranks.blocks[0])
    ranks.free()
    assert torch.equal(twin.inner.weight, block().inner.weight)
