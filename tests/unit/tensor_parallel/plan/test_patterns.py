import pytest
import torch
from torch import nn

from smp_strategy.errors import ConfigError
from smp_strategy.tensor_parallel.plan.plan import SplitKind
from smp_strategy.tensor_parallel.plan.user_choices import heads_explained, pattern_blocks


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)


class Attention(nn.Module):
    def __init__(self, heads=4, key_heads=2, fused=False):
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        if fused:
            self.qkv = nn.Linear(8, 24)
        else:
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 2 * key_heads), nn.Linear(8, 2 * key_heads)
        self.o = nn.Linear(8, 8)


def blocks_of(module, patterns, *args):
    return list(pattern_blocks(dict(module.named_modules(remove_duplicate=False)), patterns, *args))


def net():
    return nn.ModuleDict({"layers": nn.ModuleList([Mlp(), Mlp()]), "table": nn.Embedding(10, 4)})


def test_columns_that_are_known_to_go_into_rows_are_one_block():
    patterns = {"*.up": "column", "*.gate": "column", "*.down": "row"}
    first, second = blocks_of(net(), patterns, lambda column, row: True)
    assert first.layers == {
        "layers.0.up": SplitKind("column", looks_whole=True),
        "layers.0.gate": SplitKind("column", looks_whole=True),
        "layers.0.down": SplitKind("row", looks_whole=True),
    }
    assert all(name.startswith("layers.1.") for name in second.layers)


def test_what_is_not_known_to_go_into_rows_is_gathered():
    (up, down, *_) = blocks_of(net(), {"layers.0.up": "column", "layers.0.down": "row"})
    assert up.layers == {"layers.0.up": SplitKind("column", is_whole_outside=True)}
    assert down.layers == {"layers.0.down": SplitKind("row", is_whole_outside=True)}


def test_the_last_pattern_that_fits_counts():
    blocks = blocks_of(net(), {"layers.0.[gu]*": "column", "*.gate": "row"})
    found = {name: how.style for block in blocks for name, how in block.layers.items()}
    assert found == {"layers.0.up": "column", "layers.0.gate": "row", "layers.1.gate": "row"}


def test_a_module_that_is_replicated_stays_whole_with_all_that_it_holds():
    found = blocks_of(net(), {"layers.1": "replicate"})
    assert {name: how.style for block in found for name, how in block.layers.items()} == dict.fromkeys(
        ["layers.1.up", "layers.1.gate", "layers.1.down"], "whole"
    )


def test_embeddings_are_split_by_vocabulary_or_by_columns():
    assert blocks_of(net(), {"table": "vocab"})[0].layers == {"table": SplitKind("vocab")}
    assert blocks_of(net(), {"table": "embedding"})[0].layers == {
        "table": SplitKind("embedding", is_whole_outside=True)
    }


def test_named_heads_stay_together_and_their_number_is_divided():
    patterns = {"a.[qkv]": "column", "a.o": "row", "a.heads": "heads", "a.key_heads": "heads"}
    (block,) = blocks_of(nn.ModuleDict({"a": Attention()}), patterns)
    assert block.problem is None
    assert block.layers == {
        "a.q": SplitKind("column", granule=2),
        "a.k": SplitKind("column", granule=2),
        "a.v": SplitKind("column", granule=2),
        "a.o": SplitKind("row", granule=2),
    }
    assert block.divided == (("a", "heads"), ("a", "key_heads"))
    assert block.heads == {"heads": 4, "key_heads": 2}


def test_fused_queries_keys_and_values_are_three_blocks():
    patterns = {"a.qkv": "column", "a.o": "row", "a.heads": "heads"}
    (block,) = blocks_of(nn.ModuleDict({"a": Attention(fused=True)}), patterns)
    assert block.layers == {"a.qkv": SplitKind("column", num_blocks=3, granule=2), "a.o": SplitKind("row", granule=2)}


def test_layers_that_are_no_heads_are_a_reason():
    patterns = {"a.[qkv]": "column", "a.o": "row", "a.heads": "heads"}
    (block,) = blocks_of(nn.ModuleDict({"a": Attention(heads=3)}), patterns)
    assert "are not those of [3] heads of one size" in block.problem
    (block,) = blocks_of(nn.ModuleDict({"a": Attention()}), {"a.q": "column", "a.heads": "heads"})
    assert "heads need layers by columns before them and one by rows after them" in block.problem


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        ({"*.up": "columns"}, "gives `\\*.up` the style 'columns'; known are column, row"),
        ({"*.sideways": "column"}, "names `\\*.sideways`, but no module has a name like that"),
        ({"*.depth": "heads"}, "calls `\\*.depth` heads, but no module has such a whole number"),
    ],
)
def test_what_is_wrong_with_patterns_is_said(patterns, text):
    with pytest.raises(ConfigError, match=text):
        blocks_of(net(), patterns)


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        blocks_of(net(), {"*.up": "columns", "*.sideways": "column"})
    assert len(error.value.problems) == 2


@pytest.mark.parametrize(("patterns", "is_explained"), [({"*.num_heads": "heads"}, True), ({"*.up": "column"}, False)])
def test_an_error_of_code_that_has_some_of_the_heads_says_so(patterns, is_explained):
    with pytest.raises(ValueError, match="not enough values") as caught, heads_explained(patterns):
        _q, _k, _v = torch.zeros(2, 12).split(8, 1)
    notes = getattr(caught.value, "__notes__", [])
    assert any("`tensor_parallel` divides `*.num_heads`" in note for note in notes) == is_explained
