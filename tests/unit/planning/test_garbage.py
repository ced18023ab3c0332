import gc

from smp_strategy.planning.garbage import collecting_paused


def test_nothing_is_collected_inside_and_what_was_before_is_so_again():
    with collecting_paused():
        assert not gc.isenabled()
        with collecting_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
