import pytest
from torch import nn

from smp_strategy.tensor_parallel.plan.plan import LayerBlock, SplitKind
from smp_strategy.tensor_parallel.plan.resolve import choose

UP_DOWN = {"up": SplitKind("column"), "down": SplitKind("row")}


def net(width=8):
    return nn.ModuleDict({"up": nn.Linear(4, width), "down": nn.Linear(width, 4), "head": nn.Linear(4, 10)})


def decide(module, *blocks, num_ranks=2, disabled=None, refused=None):
    return choose(dict(module.named_modules(remove_duplicate=False)), blocks, num_ranks, disabled or {}, refused)


def split(choice):
    return {name: how.style for block in choice.blocks for name, how in block.layers.items()}


def test_the_first_source_that_names_a_layer_decides():
    first = LayerBlock("", "first", {"up": SplitKind("whole"), "down": SplitKind("whole")})
    assert split(decide(net(), first, LayerBlock("", "second", UP_DOWN))) == {"up": "whole", "down": "whole"}


def test_a_block_that_has_lost_a_layer_to_an_earlier_source_is_left_out():
    choice = decide(net(), LayerBlock("up", "first", {"up": SplitKind("whole")}), LayerBlock("", "second", UP_DOWN))
    assert split(choice) == {"up": "whole"}
    source, reason = choice.reasons["down"]
    assert source == "second"
    assert reason == "`up` follows first, and the rest of its block must not be split alone"


def test_a_block_with_a_disabled_layer_is_left_out():
    choice = decide(net(), LayerBlock("", "a source", UP_DOWN), disabled={"down": "it is disabled"})
    assert not choice.blocks
    assert choice.reasons["up"] == ("a source", "`down`: it is disabled")


def test_heads_that_cannot_be_divided_are_a_reason_with_numbers():
    choice = decide(net(), LayerBlock("", "a source", UP_DOWN, {"key/value heads": 3}))
    assert choice.reasons["up"] == ("a source", "3 key/value heads cannot be divided over 2 ranks")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (SplitKind("column", granule=3), "8 features in heads of 3 of `up` cannot be cut for 2 ranks"),
        (SplitKind("column", num_blocks=3), "8 features in 3 fused blocks of `up` cannot be cut for 2 ranks"),
        (SplitKind("column", granule=8), "8 features in heads of 8 of `up` cannot be cut for 2 ranks"),
        (SplitKind("vocab"), "`up` is a Linear, which has no vocabulary to split"),
    ],
)
def test_sizes_that_cannot_be_cut_are_a_reason(how, reason):
    assert decide(net(), LayerBlock("", "a source", {"up": how})).reasons["up"] == ("a source", reason)


def test_layers_that_are_none_of_the_known_kinds_are_a_reason():
    block = LayerBlock("", "a source", {"up": SplitKind("row")})
    (_, reason) = decide(nn.ModuleDict({"up": nn.LSTM(4, 4)}), block).reasons["up"]
    assert reason == "`up` is a LSTM, which cannot be split by rows: it is no linear or convolutional layer"


def test_features_need_not_be_divided_evenly():
    assert split(decide(net(7), LayerBlock("", "a source", UP_DOWN))) == {"up": "column", "down": "row"}


def test_blocks_of_one_bond_are_split_together_or_not_at_all():
    module = nn.ModuleDict({"a": net(), "b": net()})
    blocks = [
        LayerBlock(
            name,
            "a source",
            {f"{name}.up": SplitKind("column"), f"{name}.down": SplitKind("row")},
            bond="both",
            heads=heads,
        )
        for name, heads in (("a", {"heads": 4}), ("b", {"heads": 3}))
    ]
    choice = decide(module, *blocks)
    assert not choice.blocks
    _, reason = choice.reasons["a.up"]
    assert reason == "it works together with `b`, which stays whole: 3 heads cannot be divided over 2 ranks"


def tied():
    module = nn.ModuleDict({"table": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    module["head"].weight = module["table"].weight
    return module


def test_tied_layers_that_are_cut_alike_are_split():
    block = LayerBlock(
        "", "a source", {"table": SplitKind("vocab"), "head": SplitKind("column", is_whole_outside=True)}
    )
    assert split(decide(tied(), block)) == {"table": "vocab", "head": "column"}


def test_a_layer_tied_to_one_that_stays_whole_stays_whole():
    choice = decide(tied(), LayerBlock("", "a source", {"table": SplitKind("vocab")}))
    assert choice.reasons["table"] == ("a source", "its weight is tied to `head`, which is whole")


def test_tied_layers_that_are_cut_otherwise_stay_whole_and_so_do_those_that_follow():
    module = tied()
    module["twin"] = nn.Linear(4, 10, bias=False)
    module["twin"].weight = module["head"].weight
    blocks = [
        LayerBlock("t", "a", {"table": SplitKind("vocab")}),
        LayerBlock("h", "b", {"head": SplitKind("row")}),
        LayerBlock("w", "c", {"twin": SplitKind("column")}),
    ]
    choice = decide(module, *blocks)
    assert not choice.blocks
    assert choice.reasons["table"] == ("a", "its weight is tied to `head`, which is split otherwise")


def test_a_module_with_two_names_is_one_layer():
    module = net()
    module["again"] = module["up"]
    block = LayerBlock("", "a source", {"again": SplitKind("column"), "down": SplitKind("row")})
    assert split(decide(module, block)) == {"up": "column", "down": "row"}


def test_a_block_that_refused_in_the_end_is_left_out():
    choice = decide(net(), LayerBlock("it", "a source", UP_DOWN), refused={"it": "it has a forward of its own"})
    assert choice.reasons["up"] == ("a source", "it has a forward of its own")


def test_a_layer_whose_weight_other_code_reads_stays_whole():
    module = net()
    blocks = (LayerBlock("", "a source", UP_DOWN),)
    modules = dict(module.named_modules(remove_duplicate=False))
    weight, bias = id(module["up"].weight), id(module["down"].bias)
    allowed = {weight: frozenset({"up"}), bias: frozenset({"head"})}
    assert choose(modules, blocks, 2, {}, readers=allowed).blocks, "the bias of rows is not cut"
    choice = choose(modules, blocks, 2, {}, readers={weight: frozenset({"up", "head"})})
    assert choice.reasons["down"] == ("a source", "code of `head` reads the weight of `up`")


def hook_on_gradient(module):
    module["up"].weight.register_hook(lambda gradient: gradient / gradient.norm())


def hook_after_backward(module):
    module["down"].weight.register_post_accumulate_grad_hook(lambda weight: None)


def hook_on_layer(module):
    module["up"].register_forward_hook(lambda layer, given, found: found.norm())


def hook_before_layer(module):
    module["down"].register_forward_pre_hook(lambda layer, given: None)


def hook_between(module):
    module["act"].register_full_backward_hook(lambda layer, given, found: None)


@pytest.mark.parametrize(
    ("register", "reason"),
    [
        (hook_on_gradient, "a hook on the gradient of `up.weight` would see a part of it"),
        (hook_after_backward, "a hook on the gradient of `down.weight` would see a part of it"),
        (hook_on_layer, "a hook on `up` would see parts of activations"),
        (hook_before_layer, "a hook on `down` would see parts of activations"),
        (hook_between, "a hook on `act` would see parts of activations"),
    ],
)
def test_hooks_that_would_see_parts_are_a_reason(register, reason):
    module = net()
    module["act"] = nn.ReLU()
    register(module)
    assert decide(module, LayerBlock("", "a source", UP_DOWN)).reasons["up"] == ("a source", reason)


@pytest.mark.parametrize("register", [hook_on_layer, hook_before_layer, hook_between])
def test_hooks_see_whole_activations_where_parts_look_whole(register):
    module = net()
    module["act"] = nn.ReLU()
    register(module)
    layers = {"up": SplitKind("column", looks_whole=True), "down": SplitKind("row", looks_whole=True)}
    assert split(decide(module, LayerBlock("", "a source", layers))) == {"up": "column", "down": "row"}


def test_hooks_on_gradients_of_what_stays_whole_see_all_of_them():
    module = net()
    module["down"].bias.register_hook(lambda gradient: None)
    assert split(decide(module, LayerBlock("", "a source", UP_DOWN))) == {"up": "column", "down": "row"}
