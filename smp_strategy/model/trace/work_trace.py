"""How long things take: the work of a call, split as a schedule may split it, and the way between two stages."""

from typing import NamedTuple, Self

__all__ = ["Link", "Work"]


class Work(NamedTuple):
    """Seconds of one call, or of several that run together."""

    forward: float = 0.0
    input_gradient: float = 0.0
    """The part of backward that earlier stages wait for."""
    weight_gradient: float = 0.0
    """The part of backward that nobody waits for but the optimizer (Zero Bubble, arXiv:2401.10241)."""

    @property
    def backward(self) -> float:
        """Both parts."""
        return self.input_gradient + self.weight_gradient

    def scaled(self, factor: float) -> "Work":
        """The same, taking ``factor`` times as long."""
        return Work(*(factor * seconds for seconds in self))

    def plus(self, other: "Work") -> "Work":
        """Both, one after the other."""
        return Work(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Link(NamedTuple):
    """What lies between two stages."""

    latency: float
    """Seconds until the first byte of a message arrives."""
    bytes_per_second: float

    @classmethod
    def instant(cls) -> Self:
        """Messages that take no time."""
        return cls(0.0, float("inf"))

    def seconds(self, nbytes: int) -> float:
        """How long a message of ``nbytes`` is under way."""
        return self.latency + nbytes / self.bytes_per_second
