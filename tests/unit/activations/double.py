"""A device that writes down what it is asked to do, and is done with it when the test says so."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Moment:
    """Where the device is when it has done so much."""

    def __init__(self, name: str, effect: Callable[[], None] | None = None) -> None:
        self.name = name
        self.effect = effect
        self.is_past = False

    def query(self) -> bool:
        return self.is_past

    def pass_by(self) -> None:
        """The device comes here."""
        if not self.is_past:
            self.is_past = True
            effect, self.effect = self.effect, None  # it holds what it copies
            if effect is not None:
                effect()

    def __repr__(self) -> str:
        return self.name


class Device:
    """Copies between a device and the host as :class:`smp_strategy.distributed.host_copies.HostCopies`.

    Copies happen when they are waited for, or when :meth:`work` is called: whoever reads too early, or uses memory
    again that is still being read, gets wrong numbers.

    Attributes:
        log: what was asked for, in order; the sizes are in bytes.
        after: for each copy, the copies that it has to wait for.
    """

    def __init__(self, kind: str = "cpu") -> None:
        self.device = torch.device(kind)
        self.log: list[str] = []
        self.after: dict[str, list[str]] = {}
        self.under_way: list[Moment] = []
        self.allocated = 0
        self._num_copies = 0

    def memory(self, nbytes: int) -> Tensor:
        self.allocated += nbytes
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def now(self) -> Moment:
        moment = Moment("computed")
        moment.pass_by()
        return moment

    def store(self, source: Tensor, target: Tensor, *, after: list[Moment]) -> Moment:
        return self._begin("store", source, target, after)

    def load(self, source: Tensor, *, after: list[Moment]) -> tuple[Tensor, Moment]:
        target = torch.full_like(source, 255)
        return target, self._begin("load", source, target, after)

    def wait(self, moment: Moment) -> None:
        if not moment.is_past:
            self.log.append(f"wait for {moment}")
        self._pass(moment)

    def work(self) -> None:
        """Everything is done that was asked for."""
        for moment in list(self.under_way):
            self._pass(moment)

    def take_log(self) -> list[str]:
        """What was asked for since the last time."""
        taken, self.log = self.log, []
        return taken

    def _begin(self, kind: str, source: Tensor, target: Tensor, after: Iterable[Moment]) -> Moment:
        self._num_copies += 1
        earlier = list(after)

        def copy() -> None:
            for other in earlier:
                self._pass(other)
            target.copy_(source)

        moment = Moment(f"{kind} {self._num_copies}", copy)
        self.log.append(f"{moment}: {source.numel()}")
        self.after[moment.name] = [other.name for other in earlier if other.name != "computed"]
        self.under_way.append(moment)
        return moment

    def _pass(self, moment: Moment) -> None:
        if moment in self.under_way:
            self.under_way.remove(moment)
        moment.pass_by()
