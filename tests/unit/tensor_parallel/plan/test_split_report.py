import pytest

from smp_strategy.errors import ConfigError
from smp_strategy.tensor_parallel.plan.plan import LayerLine, SplitReport


def test_layers_that_are_alike_are_one_line_with_ranges_of_numbers():
    lines = [LayerLine(f"h.{n}.up", "Linear", "by columns", "a plan", True) for n in (0, 1, 2, 4)]
    lines += [LayerLine("h.3.up", "Linear", "whole", "3 heads cannot be divided over 2 ranks", False, True)]
    lines += [LayerLine("norm", "LayerNorm", "whole", "has vectors only", False)]
    report = SplitReport(tuple(lines), 2)
    assert str(report).splitlines() == [
        "4 of 6 layers are split over 2 ranks",
        "layer         class      split       why",
        "----------------------------------------",
        "h.{0-2,4}.up  Linear     by columns  a plan",
        "h.3.up        Linear     whole       3 heads cannot be divided over 2 ranks",
        "norm          LayerNorm  whole       has vectors only",
        "1 layer with matrices stays whole: each rank computes all of it. Name it in `tensor_parallel` "
        '(`{"h.3.up": "column"}`; `replicate` if that is meant), or choose a degree that divides the sizes in the '
        "reasons.",
    ]
    assert [line.name for line in report.skipped] == ["h.3.up"]


def test_reasons_that_differ_in_the_block_only_are_told_once():
    lines = [LayerLine(f"h.{n}.q", "Linear", "whole", f"`h.{n}.k` is disabled", False, True) for n in range(2)]
    assert len(str(SplitReport(tuple(lines), 2)).splitlines()) == 5


def test_the_title_says_where_the_stream_is_split_along_the_sequence_if_that_was_wanted():
    line = LayerLine("up", "Linear", "by columns", "a plan", True)
    title = "1 of 1 layers are split over 2 ranks; layers between which each rank has some of the tokens: "
    assert str(SplitReport((line,), 2, ("encoder.layers", "h"))).startswith(f"{title}those of encoder.layers, h\n")
    assert str(SplitReport((line,), 2, ())).startswith(f"{title}none: no list has split layers throughout\n")


def test_a_split_of_nothing_is_refused_with_the_reasons_of_each_class():
    lines = [LayerLine(f"h.{n}.up", "Linear", "whole", "nothing says how to split it", False, True) for n in range(3)]
    lines.append(LayerLine("norm", "LayerNorm", "whole", "has vectors only", False))
    with pytest.raises(ConfigError) as caught:
        SplitReport(tuple(lines), 2).refuse_unsplit()
    assert str(caught.value).startswith(
        "`tensor_parallel_degree` is 2, but none of the 4 layers would be split, and every rank would compute all of "
        "them: Linear (3 layers): nothing says how to split it; LayerNorm (1 layer): has vectors only. Name layers in "
    )
    with pytest.raises(ConfigError, match="no module has parameters of its own"):
        SplitReport((), 2).refuse_unsplit()


def test_what_is_split_somewhere_or_whole_on_demand_is_not_refused():
    norm = LayerLine("norm", "LayerNorm", "whole", "has vectors only", False)
    whole = LayerLine("up", "Linear", "whole", "pattern", False, is_asked=True)
    for lines in ([norm, LayerLine("up", "Linear", "by columns", "a plan", True)], [norm, whole]):
        SplitReport(tuple(lines), 2).refuse_unsplit()
    SplitReport((norm,), 1).refuse_unsplit()
