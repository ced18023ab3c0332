"""Tables that a helper caches for all blocks: each stage makes its own, and dry runs leave none behind."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from .compare import WIDTH, Block, Blocks, Case, check, mean_square, refusal


@functools.lru_cache(maxsize=8)
def table(length: int) -> Tensor:
    return torch.sin(torch.arange(length).float())[:, None]


@functools.cache
def tables(length: int) -> dict[str, tuple[Tensor, Tensor]]:
    return {"both": (torch.cos(torch.arange(length).float())[:, None], torch.ones(()))}


class Memoized(Block):
    @staticmethod
    @functools.lru_cache
    def own(length: int) -> Tensor:
        return torch.full((length, 1), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        cos, one = tables(len(x))["both"]
        return super().forward(x * table(len(x)) + cos * one + self.own(len(x)))


class OnTheClass(Block):
    tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in OnTheClass.tables:
            OnTheClass.tables[len(x)] = torch.arange(len(x)).float()[:, None] / 8
        return super().forward(x * OnTheClass.tables[len(x)])


def in_order(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x) + table(len(x))
    return mean_square(x)


class OfAnySize(Blocks):
    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        samples = int(torch.randint(3, 10, (), generator=generator))
        return {"x": torch.randn(samples, WIDTH, generator=generator)}


@pytest.mark.dear
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("block", [Memoized, OnTheClass])
def test_a_table_that_all_blocks_use_is_made_on_each_stage(block: type[Block], pp: int) -> None:
    for make in (Blocks, OfAnySize):
        check(Case(lambda make=make: make(in_order, block)), pp)


ONLY_ONCE: dict[str, Tensor] = {}


class OfTheFirst(Block):
    def forward(self, x: Tensor, first: bool = False) -> Tensor:
        if first:
            ONLY_ONCE["table"] = torch.arange(len(x)).float()[:, None]
        return super().forward(x * ONLY_ONCE["table"])


class OfValues(Block):
    def forward(self, x: Tensor, first: bool = False) -> Tensor:
        if first:
            ONLY_ONCE["values"] = x * 2
        return super().forward(x * ONLY_ONCE["values"])


def first_makes_it(net: Any, x: Tensor) -> Tensor:
    for number, block in enumerate(net.blocks):
        x = block(x, number == 0)
    return mean_square(x)


@pytest.mark.parametrize("block", [OfTheFirst, OfValues])
def test_a_table_that_only_the_first_block_makes_is_refused_by_name(block: type[Block]) -> None:
    assert "put into an object (a cache, say), but the two" in refusal(Case(lambda: Blocks(first_makes_it, block)))
