"""What autotuning chose for a segment and what it measured: plain values, kept with the segment and on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from transmuter_async.operators import DEFAULT_FUSIONS

__all__ = ["Trial", "Tuning", "Variant"]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compile a segment.

    Attributes:
        lowerings: Names of the forms that operators take, see `operators.LOWERINGS`.
        fusions: What XLA may give to its library on a CPU, a name of `operators.FUSIONS`.
    """

    lowerings: frozenset[str]
    fusions: str = DEFAULT_FUSIONS

    def named(self, default: Variant, taken: tuple[str, ...]) -> str:
        """In words, next to the default one, whose operators take the forms `taken`."""
        missing = [name for name in taken if name not in self.lowerings]
        parts = []
        if self.fusions != default.fusions:
            parts.append(f"fusions: {self.fusions}")
        if missing:
            every = len(missing) == len(taken) > 1
            parts.append("plain forms" if every else f"without {', '.join(missing)}")
        return "; ".join(parts) or "default"

    def without(self, *names: str) -> Variant:
        """The same, but operators do not take these forms."""
        return replace(self, lowerings=self.lowerings - set(names))


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate, measured next to the default program: their calls took turns.

    Attributes:
        name: What it does otherwise than the default.
        nanoseconds: Of its shortest call; None where it was not measured.
        default_nanoseconds: Of the default program's shortest call in the same turns.
        compile_nanoseconds: What its tracing and compiling took.
        out: Why it can't be chosen, in words; None where it was only a matter of time.
        wrong: Whether it is out because its results differ.
    """

    name: str
    nanoseconds: int | None = None
    default_nanoseconds: int | None = None
    compile_nanoseconds: int = 0
    out: str | None = None
    wrong: bool = False

    @property
    def ratio(self) -> float | None:
        """Its time over that of the default program; below 1 it is faster."""
        if self.nanoseconds is None or not self.default_nanoseconds:
            return None
        return self.nanoseconds / self.default_nanoseconds


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was chosen for a segment.

    Attributes:
        chosen: Name of the variant, "default" where no other is faster.
        trials: What was tried, in order.
        values: Where inputs came from: "call", or "drawn" where only shapes were known.
        nanoseconds: What all of it took.
        note: Why nothing, or not everything, was tried; empty without.
    """

    chosen: str
    trials: tuple[Trial, ...] = ()
    values: str = "call"
    nanoseconds: int = 0
    note: str = ""

    @property
    def wrong(self) -> tuple[Trial, ...]:
        """The candidates that were thrown out because their results differ."""
        return tuple(trial for trial in self.trials if trial.wrong)

    def record(self) -> dict[str, Any]:
        """As plain data, for the disk."""
        return asdict(self)

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Tuning:
        """From `record`'s plain data.

        Raises:
            TypeError, KeyError: It is something else.
        """
        return cls(**{**record, "trials": tuple(Trial(**trial) for trial in record["trials"])})
