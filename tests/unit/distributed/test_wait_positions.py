"""Who can go on follows from what ranks wait for, have begun and have sent."""

from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.distributed.wait_positions import Condition, Position, blockers, is_deadlock, story
from smp_strategy.integrations.lightning.joining import WORDS as OF_LIGHTNING

WORLD = (0, 1, 2)


def position(needs=(), *, begun=None, sent=(), doing="", tick=1, turn=1):
    return Position(tick, turn, needs, begun or {}, set(sent), doing, "", ("here", 1))


def message(*needs, sent=()):
    """Waits for one of some messages, each of a source and a tag."""
    return position([[Condition(source, f"from {source}", tag)] for source, tag in needs], sent=sent)


def meeting(number, *, doing="save", latest=None, ranks=WORLD, channel="world"):
    """Waits in the collective ``number`` of a group."""
    begun = {channel: (number, latest or [doing] * number)}
    return position([[Condition(rank, channel, number) for rank in ranks]], begun=begun, doing=doing)


def test_two_ranks_that_wait_for_each_other_are_stuck_unless_a_message_is_under_way():
    assert is_deadlock(0, {0: message((1, 7)), 1: message((0, 8))})
    assert not is_deadlock(0, {0: message((1, 7)), 1: message((0, 8), sent=[("from 1", 7)])})
    assert not is_deadlock(0, {0: message((1, 7))})


def test_the_first_message_has_the_tag_0():
    assert is_deadlock(0, {0: message((1, 0)), 1: message((0, 0))})


def test_one_of_several_messages_is_enough():
    assert not is_deadlock(0, {0: message((1, 7), (2, 7)), 1: message((0, 8))})
    assert is_deadlock(0, {0: message((1, 7), (2, 7)), 1: message((0, 8)), 2: message((1, 9))})


def test_a_collective_waits_for_all_of_its_group_and_for_nobody_else():
    assert not is_deadlock(0, {rank: meeting(3) for rank in WORLD})
    assert not is_deadlock(0, {0: meeting(3), 1: meeting(3)})
    assert is_deadlock(0, {0: meeting(3), 1: meeting(3), 2: message((0, 7))})
    assert not is_deadlock(0, {0: meeting(3, ranks=(0, 1)), 1: meeting(3, ranks=(0, 1)), 2: message((0, 7))})


def test_a_rank_that_has_begun_more_collectives_of_a_group_has_done_its_part():
    behind, ahead = meeting(3), meeting(4)
    assert not is_deadlock(0, {0: behind, 1: ahead})
    assert is_deadlock(1, {0: message((1, 7)), 1: ahead})


def test_another_collective_with_the_same_number_is_no_part_of_this_one():
    assert is_deadlock(0, {0: meeting(3, ranks=(0, 1)), 1: meeting(3, doing="load", ranks=(0, 1))})
    elsewhere = position([[Condition(0, "from 0", 8)]], begun={"world": (3, ["save", "save", "load"])})
    assert is_deadlock(0, {0: meeting(3, ranks=(0, 1)), 1: elsewhere})
    # Long ago it is not known any more what it was.
    long_ago = position([[Condition(0, "from 0", 8)]], begun={"world": (9, ["load"] * 6)})
    assert not is_deadlock(0, {0: meeting(3, ranks=(0, 1)), 1: long_ago})


def test_collectives_of_two_groups_in_different_orders_are_a_circle():
    assert is_deadlock(0, {0: meeting(1, ranks=(0, 1), channel="a"), 1: meeting(1, ranks=(0, 1), channel="b")})


def test_blockers_are_the_ranks_at_work_behind_all_who_wait():
    at_work = position(turn=0)
    assert blockers(0, {0: message((1, 7)), 1: message((2, 7)), 2: at_work}) == {2}
    assert blockers(0, {0: meeting(3), 1: meeting(3)}) == {2}
    assert blockers(0, {0: message((1, 7)), 1: at_work}) == {1}


def test_a_rank_stands_still_if_it_says_the_same_again():
    before = position(tick=4, turn=2)
    assert position(tick=5, turn=2).stands_still(before)
    assert not position(tick=4, turn=2).stands_still(before)
    assert not position(tick=5, turn=3).stands_still(before)
    assert not position(tick=5, turn=0).stands_still(position(tick=4, turn=0))
    assert not before.stands_still(None)


MESSAGES = st.lists(st.tuples(st.integers(0, 3), st.just(1)), min_size=1)
NUMBERS = st.integers(1, 3)
POSITIONS = st.dictionaries(
    st.integers(0, 3),
    MESSAGES.map(lambda needs: message(*needs)) | NUMBERS.map(lambda number: meeting(number, ranks=(0, 1, 2, 3))),
    max_size=4,
)


@given(POSITIONS)
def test_a_position_is_read_as_it_was_told(positions):
    for each in positions.values():
        again = Position.decode(each.encode())
        assert again._replace(begun={}) == each._replace(begun={})
        assert again.begun == {channel: [number, latest] for channel, (number, latest) in each.begun.items()}


@given(POSITIONS)
def test_whoever_is_stuck_waits_for_somebody_who_is_stuck_and_not_for_those_at_work_alone(positions):
    for rank, each in positions.items():
        if is_deadlock(rank, positions):
            needed = {need.rank for needs in each.needs for need in needs} & positions.keys()
            assert any(is_deadlock(other, positions) for other in needed)
        elif all(need.rank in positions for needs in each.needs for need in needs):
            others = {other for other in positions if not is_deadlock(other, positions)}
            assert others & ({rank} | {need.rank for needs in each.needs for need in needs})


@given(POSITIONS, st.integers(0, 3))
def test_one_more_rank_at_work_never_makes_another_stuck(positions, gone):
    fewer = {rank: each for rank, each in positions.items() if rank != gone}
    assert all(is_deadlock(rank, positions) for rank in fewer if is_deadlock(rank, fewer))


@given(POSITIONS)
def test_nobody_is_stuck_who_waits_for_ranks_at_work_only(positions):
    for rank, each in positions.items():
        if any(all(need.rank not in positions for need in needs) for needs in each.needs):
            assert not is_deadlock(rank, positions)


def test_ranks_whose_data_loaders_have_given_fewer_batches_are_named():
    ended = position(doing="the end")._replace(read=(14, True))
    going = position(doing="a step")._replace(read=(15, False))
    text = story({0: going, 1: ended}, OF_LIGHTNING)
    assert "rank 0: for a step; ; its data loader has given 15 batches\n" in text
    assert "rank 1: for the end; ; its data loader has given 14 batches, and has no more\n" in text
    assert "Data loaders have given fewer batches on some ranks" in text


def test_data_loaders_that_are_alike_are_no_subject():
    each = position(doing="a step")._replace(read=(14, True))
    assert "data loader" not in story({0: each, 1: each}, OF_LIGHTNING)


def test_a_position_is_read_as_it_was_written():
    each = message((1, 7), sent=[("from 1", 7)])._replace(read=(3, True))
    assert Position.decode(each.encode()) == each
