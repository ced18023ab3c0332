"""Memory report as text, JSON and HTML."""

import json

import pytest

from smp_strategy.errors import ConfigError
from smp_strategy.planning.memory.sharded import RankMemory
from smp_strategy.planning.partition.problem import HeldBytes
from smp_strategy.reports.memory_report import MemoryReport
from tests.unit.reports.pages import Page

MIB = 1 << 20


def of_rank(rank: int, stage: int, size: int = MIB) -> RankMemory:
    return RankMemory(
        rank=rank, stage=stage, parameters=size, gathered=2 * size, gradients=size, optimizer=2 * size, buffers=7
    )


def report(rank: int = 0) -> MemoryReport:
    return MemoryReport(
        ranks=(of_rank(0, 1), of_rank(1, 0, 5 * MIB), of_rank(2, 1), of_rank(3, 0)),
        predicted=(HeldBytes(5 * MIB, 5 * MIB, 10 * MIB, 10 * MIB, 99 * MIB), HeldBytes(MIB, MIB, 3 * MIB)),
        rank=rank,
    )


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]


def test_the_table_has_each_rank_of_a_stage_and_then_what_was_predicted():
    text = str(report())
    assert text.startswith("4 ranks hold 48.0 MiB, the fullest of them (rank 1) 30.0 MiB\n")
    found = rows(text)
    assert [row[:2] for row in found] == [
        *(["0", "1"], ["0", "3"], ["", "predicted"], ["1", "0"], ["1", "2"], ["", "predicted"]),
        ["all", ""],
    ]
    assert found[0][2:] == ["5.0 MiB", "10.0 MiB", "5.0 MiB", "10.0 MiB", "7 B", "30.0 MiB"]
    assert found[2][2:] == ["5.0 MiB", "10.0 MiB", "5.0 MiB", "10.0 MiB", "", "30.0 MiB"]
    assert found[-1][2:] == ["8.0 MiB", "16.0 MiB", "8.0 MiB", "16.0 MiB", "28 B", "48.0 MiB"]
    assert max(map(len, text.splitlines())) <= 118


def test_without_a_partition_there_are_no_predictions():
    text = str(MemoryReport(ranks=(of_rank(0, 0),), predicted=(), rank=0))
    assert [row[1] for row in rows(text)] == ["0", ""]
    assert text.startswith("The one rank holds 6.0 MiB\n")


def test_the_data_are_in_bytes():
    data = json.loads(report().to_json())
    first = {"parameters": MIB, "gathered": 2 * MIB, "gradients": MIB, "optimizer": 2 * MIB, "buffers": 7}
    assert data["ranks"][0] == {"rank": 0, "stage": 1, **first, "total": 6 * MIB + 7}
    predicted = {"parameters": MIB, "gathered": 0, "gradients": MIB, "optimizer": 3 * MIB}
    assert data["predicted"][1] == {"stage": 1, **predicted}
    assert data["total"] == 48 * MIB + 28


def test_the_page_has_the_same_rows():
    words = Page(report().to_html()).words
    assert "30.0 MiB" in words
    assert words.count("predicted") == 2


def test_rank_0_alone_writes_in_the_form_of_the_ending(tmp_path):
    for name, begin in (("a.txt", "4 ranks"), ("b.json", "{"), ("c.html", "<!doctype html>")):
        report(1).save(tmp_path / name)
        assert not (tmp_path / name).exists()
        report().save(tmp_path / name)
        assert (tmp_path / name).read_text().startswith(begin)
    with pytest.raises(ConfigError, match=r"'d\.pdf'. Change its ending"):
        report(1).save(tmp_path / "d.pdf")
