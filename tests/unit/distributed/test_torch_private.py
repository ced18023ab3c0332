"""Private functions of PyTorch do what the package expects of them."""

import multiprocessing
import weakref
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from smp_strategy.distributed import torch_private as private


class Told(torch.autograd.Function):
    """Identity; its backward calls a function."""

    @staticmethod
    def forward(ctx, x, told):
        ctx.told = told
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.told()
        return gradient, None


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


def test_a_backward_has_a_number_and_an_end():
    seen, x = [], leaf()

    def inside():
        seen.append((private.is_in_backward(), private.current_backward()))
        private.after_backward(lambda: seen.append(x.grad is not None))

    y = Told.apply(Told.apply(x, lambda: None), inside)
    assert (private.is_in_backward(), private.current_backward()) == (False, -1)
    y.sum().backward()
    (is_in, number), is_over = seen
    assert is_in
    assert number >= 0
    assert is_over, "called when all gradients are there"
    assert not private.is_in_backward()


@pytest.mark.parametrize("keeps", [False, True])
def test_whether_a_backward_keeps_its_graph(keeps):
    seen = []
    Told.apply(leaf(), lambda: seen.append(private.keeps_graph())).sum().backward(retain_graph=keeps)
    assert seen == [keeps]


def test_which_nodes_a_backward_reaches():
    x, other, seen = leaf(), leaf(), []
    used, unused = x * 2, other * 2
    y = Told.apply(used, lambda: seen.extend(private.will_run(each.grad_fn) for each in (used, unused)))
    torch.autograd.grad(y.sum(), x)
    assert seen == [True, False]


def test_later_nodes_have_higher_numbers():
    before = private.sequence_number()
    leaf() * 2
    assert private.sequence_number() > before


def test_the_innermost_hooks_for_saved_tensors_are_known():
    assert private.outer_saved_tensor_hooks() is None
    with saved_tensors_hooks(pack := lambda x: x, unpack := lambda x: x):
        assert private.outer_saved_tensor_hooks() == (pack, unpack)


def test_transforms_and_profilers_are_noticed():
    seen = []

    def function(x):
        seen.append(private.is_under_transform())
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    assert seen == [True]
    assert not private.is_under_transform()
    assert not private.is_profiling()
    with torch.profiler.profile():
        assert private.is_profiling()


@pytest.mark.parametrize("as_in_torch", [True, False])
def test_checkpoints_run_where_they_are_told(as_in_torch):
    ran, asked = [], []

    def around(original, *arguments):
        asked.append(arguments)
        yield from original() if as_in_torch else [None]

    def contexts():
        return nullcontext(), nullcontext()

    def function(x, *, by):
        ran.append(by)
        return (x * by).exp()

    options = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    with private.checkpoints_run_in(around):
        checkpoint(function, leaf(), by=2, **options).sum().backward()
    checkpoint(function, leaf(), by=3, **options)
    assert asked == [(function, False, contexts)]
    assert ran == ([2, 2, 3] if as_in_torch else [2, 3])


class Loud(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


class Quiet(Tensor):
    __torch_function__ = private.disabled_torch_function


class LoudMode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise AssertionError(func)


def test_functions_can_treat_subclasses_as_plain_tensors():
    loud = torch.ones(2).as_subclass(Loud)
    with private.plain_functions():
        assert loud.sum().item() == 2
    with LoudMode(), private.plain_functions_and_modes():
        assert loud.sum().item() == 2
    assert type(torch.ones(2).as_subclass(Quiet) + 1) is Tensor


def test_the_node_of_a_tensor_does_not_depend_on_its_class():
    class Hides(Tensor):
        @property
        def grad_fn(self):
            return None

    y = (leaf() * 2).as_subclass(Hides)
    assert y.grad_fn is None
    assert private.node_of(y) is not None


def test_functions_in_cpp_have_a_namespace():
    assert private.native_functions.gelu is F.gelu


def test_contents_are_swapped_and_references_stay():
    meta, values = torch.empty(2, device="meta"), torch.ones(2)
    weak = weakref.ref(meta)
    private.swap_contents(meta, values)
    assert weak() is meta
    assert meta.tolist() == [1, 1]
    assert values.is_meta


def test_uses_of_a_memory_are_counted():
    tensor = torch.ones(4)
    alone = private.num_storage_uses(tensor)
    view = tensor[1:]
    assert private.num_storage_uses(tensor) == alone + 1
    del view
    assert private.num_storage_uses(tensor) == alone


def test_expanded_tensors_overlap_themselves():
    assert private.overlaps_itself(torch.ones(1).expand(3))
    assert not private.overlaps_itself(torch.ones(3))


def test_an_alias_without_the_version_key_shares_the_counter_and_is_no_view():
    tensor = torch.ones(2)
    with private.without_version_key():
        alias = tensor.detach()
    tensor.add_(1)
    assert alias._version == tensor._version == 1
    assert not alias._is_view()


def test_arguments_of_to():
    assert private.parse_to("cpu", torch.float16)[:2] == (torch.device("cpu"), torch.float16)
    assert private.parse_to(torch.float64)[0] is None


def test_gradients_are_unscaled_and_checked_at_once():
    gradients, overflow = [torch.tensor([2.0, 4.0]), torch.tensor([8.0])], torch.zeros(())
    private.unscale_(gradients, overflow, torch.tensor(0.5))
    assert [each.tolist() for each in gradients] == [[1, 2], [4]]
    assert overflow.item() == 0
    private.unscale_([torch.tensor([float("inf")])], overflow, torch.tensor(0.5))
    assert overflow.item() == 1


def test_a_false_condition_raises_its_message():
    private.assert_later(torch.tensor(True), "not raised")
    with pytest.raises(RuntimeError, match="a message"):
        private.assert_later(torch.tensor(False), "a message")


def test_the_default_group_and_its_store():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = private.default_group()
        assert group is dist.group.WORLD
        private.default_store().set("key", "value")
        assert private.default_store().get("key") == b"value"
    finally:
        dist.destroy_process_group()


def test_a_group_gets_a_backend_of_another_one():
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group, other = private.default_group(), dist.new_group(backend="gloo")
        host = torch.device("cpu")
        assert group._device_types == [torch.device("cuda")]
        private.set_backend(group, host, of=other)
        assert host in group._device_types
        dist.all_reduce(torch.ones(1), group=group)
        found = [None]
        dist.all_gather_object(found, "told", group=group)
        assert found == ["told"]
    finally:
        dist.destroy_process_group()


def opened(exported: tuple) -> list[int]:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    memory = private.open_device_memory(exported, device)
    found = memory[:4].tolist()
    memory[0] = 9
    torch.cuda.synchronize()
    return found


def exporting(connection) -> None:
    memory = torch.arange(1 << 20, device="cuda:0").to(torch.uint8)
    torch.cuda.synchronize()
    connection.send(private.export_device_memory(memory))
    connection.recv()
    connection.send(int(memory[0]))


@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")
def test_memory_of_a_device_is_opened_by_another_process():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=exporting, args=(theirs,))
    process.start()
    assert opened(ours.recv()) == [0, 1, 2, 3]
    ours.send("written")
    assert ours.recv() == 9
    process.join()


def test_memory_of_a_device_is_exported_without_its_device_and_opened_on_another(monkeypatch):
    storage = mock.Mock(_share_cuda_=lambda: (3, b"handle", 64, 512, b"counter", 0, b"event", True))
    exported = private.export_device_memory(mock.Mock(untyped_storage=lambda: storage))
    assert exported == (b"handle", 64, 512, b"counter", 0, b"event", True)
    for name in ("_share_cuda_", "_new_shared_cuda"):
        assert callable(getattr(torch.UntypedStorage, name))
    calls = []

    class Storage:
        @staticmethod
        def _new_shared_cuda(*arguments):
            calls.append(arguments)
            return torch.arange(8, dtype=torch.uint8).untyped_storage()

    monkeypatch.setattr(torch, "UntypedStorage", Storage)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: torch.zeros(size, dtype=dtype))
    assert private.open_device_memory(exported, torch.device("cuda", 1)).tolist() == list(range(8))
    assert calls == [(1, *exported)]
