"""Flat buffers and how they are cut."""

import math

from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.data_parallel.flat_layout import BLOCK_BYTES, FlatLayout, FlatParameter, UnitLayout

ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "uint8": 1, "complex128": 16}


def entry(name: str, *shape: int, dtype: str = "float32", requires_grad: bool = True) -> FlatParameter:
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    size = ITEMSIZES[dtype]
    return FlatParameter(
        names=(name,), shape=shape, stride=stride, dtype=dtype, itemsize=size, requires_grad=requires_grad
    )


shapes = st.lists(st.integers(0, 40), max_size=3)
units = st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEMSIZES)), st.booleans()), max_size=8).map(
    lambda found: [
        entry(f"p{number}", *shape, dtype=dtype, requires_grad=trained)
        for number, (shape, dtype, trained) in enumerate(found)
    ]
)
degrees = st.integers(1, 7)


def put_together(flat: FlatLayout) -> dict[str, list[int]]:
    """The elements of each parameter, collected from all ranks' shards of a buffer that holds its element numbers."""
    found: dict[str, list[int]] = {}
    for rank in range(flat.degree):
        shard = range(rank * flat.shard_numel, (rank + 1) * flat.shard_numel)
        for slot in flat.slots:
            piece = flat.piece(slot, rank)
            elements = found.setdefault(slot.entry.names[0], [])
            assert not piece.numel or piece.start == len(elements)
            elements += [number - slot.offset for number in shard[piece.offset : piece.offset + piece.numel]]
    return found


@given(units, degrees, st.integers(0, 100))
def test_the_pieces_of_all_ranks_give_every_parameter_back(entries, degree, threshold):
    layout = UnitLayout.of(entries, degree, threshold)
    found: dict[str, list[int]] = {}
    for flat in layout.flats:
        found |= put_together(flat)
    assert found == {each.names[0]: list(range(each.numel)) for each in entries}


@given(units, degrees, st.integers(1, 3))
def test_owners_have_a_part_of_their_shard_each_one_behind_the_other(entries, degree, num_owners):
    for flat in UnitLayout.of(entries, degree, num_owners=num_owners).flats:
        assert flat.shard_numel == num_owners * flat.own_numel
        for slot in flat.slots:
            for rank in range(degree):
                shard = flat.piece(slot, rank)
                elements = []
                for owner in range(num_owners):
                    piece = flat.own_piece(slot, rank, owner)
                    offset = owner * flat.own_numel + piece.offset - shard.offset
                    assert not piece.numel or offset == piece.start - shard.start
                    elements += range(piece.start, piece.start + piece.numel)
                assert elements == list(range(shard.start, shard.start + shard.numel))


@given(units, degrees)
def test_a_buffer_has_parameters_of_one_kind_in_their_order(entries, degree):
    layout = UnitLayout.of(entries, degree)
    for flat in layout.flats:
        kinds = {(slot.entry.dtype, slot.entry.requires_grad) for slot in flat.slots}
        assert kinds == {(flat.dtype, flat.is_trained)}
        numbers = [entries.index(slot.entry) for slot in flat.slots]
        assert numbers == sorted(numbers)


@given(units, degrees)
def test_sizes_follow_the_formula_and_little_is_padding(entries, degree):
    for flat in UnitLayout.of(entries, degree).flats:
        block = BLOCK_BYTES // flat.itemsize
        blocks = sum(math.ceil(slot.entry.numel / block) for slot in flat.slots)
        assert flat.full_numel == degree * block * math.ceil(blocks / degree)
        # Less than a block per rank at the end, and less than one behind each parameter.
        assert flat.full_numel - blocks * block < degree * block
        padding = sum(stop - start for start, stop in flat.padding)
        assert padding == flat.full_numel - sum(slot.entry.numel for slot in flat.slots)
        assert padding < (degree + len(flat.slots)) * block


@given(units, degrees)
def test_all_shards_have_the_same_size_and_only_the_last_ones_can_be_empty(entries, degree):
    for flat in UnitLayout.of(entries, degree).flats:
        assert degree * flat.shard_bytes == flat.full_bytes
        held = [sum(flat.piece(slot, rank).numel for slot in flat.slots) for rank in range(degree)]
        assert max(held) <= flat.shard_numel
        filled = [bool(elements) for elements in held]
        assert filled == sorted(filled, reverse=True)


@given(units, degrees)
def test_parameters_and_shards_begin_at_blocks_so_that_vectors_are_not_cut(entries, degree):
    for flat in UnitLayout.of(entries, degree).flats:
        for rank in range(degree):
            assert rank * flat.shard_bytes % BLOCK_BYTES == 0
            for slot in flat.slots:
                piece = flat.piece(slot, rank)
                assert slot.offset * flat.itemsize % BLOCK_BYTES == 0
                assert piece.start * flat.itemsize % BLOCK_BYTES == 0


def test_small_parameters_stay_gathered_and_are_cut_like_all_others():
    layout = UnitLayout.of([entry("large", 64, 8), entry("small", 64)], degree=2, persistence_threshold=65)
    large, small = layout.flats
    assert [flat.is_persistent for flat in layout.flats] == [False, True]
    assert (large.full_bytes, small.full_bytes) == (2048, 256)
    assert layout.shard_bytes == (2048 + 256) // 2
    assert layout.resting_bytes == 1024 + 256
    assert layout.transient_bytes == 2048
    assert layout.full_bytes == 2048 + 256


def test_a_unit_without_parameters_takes_no_memory():
    layout = UnitLayout.of([], degree=4)
    assert (layout.full_bytes, layout.shard_bytes, layout.resting_bytes) == (0, 0, 0)


@given(units, degrees, st.integers(1, 3))
def test_pieces_with_elements_are_found_without_asking_every_owner(entries, degree, num_owners):
    for flat in UnitLayout.of(entries, degree, 0, num_owners).flats:
        for slot in flat.slots:
            all_pieces = {
                rank * num_owners + owner: flat.own_piece(slot, rank, owner)
                for rank in range(degree)
                for owner in range(num_owners)
            }
            assert flat.own_pieces(slot) == {owner: piece for owner, piece in all_pieces.items() if piece.numel}
