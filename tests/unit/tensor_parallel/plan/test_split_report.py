from smp_strategy.tensor_parallel.plan.split_report import LayerLine, SplitReport


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
    ]
    assert [line.name for line in report.skipped] == ["h.3.up"]


def test_reasons_that_differ_in_the_block_only_are_told_once():
    lines = [LayerLine(f"h.{n}.q", "Linear", "whole", f"`h.{n}.k` is disabled", False, True) for n in range(2)]
    assert len(str(SplitReport(tuple(lines), 2)).splitlines()) == 4


def test_the_title_says_where_the_stream_is_split_along_the_sequence_if_that_was_wanted():
    line = LayerLine("up", "Linear", "by columns", "a plan", True)
    title = "1 of 1 layers are split over 2 ranks; layers between which each rank has some of the tokens: "
    assert str(SplitReport((line,), 2, ("encoder.layers", "h"))).startswith(f"{title}those of encoder.layers, h\n")
    assert str(SplitReport((line,), 2, ())).startswith(f"{title}none: no list has split layers throughout\n")
