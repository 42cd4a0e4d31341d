"""What a program reports beside its outputs: indices out of range, NaN, refused values; and how warnings reach the caller."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from transmuter_async.errors import (
    IndexOutOfRange,
    NonFiniteError,
    NonFiniteWarning,
    OperatorError,
    TransmuterError,
)

__all__ = ["Alarm", "heard", "out_of_range"]

_listener: ContextVar[list[str] | None] = ContextVar("transmuter_async_heard", default=None)


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect what `nonfinite="warn"` says in this thread, instead of issuing it here.

    A warning is of use in the thread and at the line of whoever called; filters, `catch_warnings` and `-W error` of a worker
    thread are nobody's.
    """
    texts: list[str] = []
    token = _listener.set(texts)
    try:
        yield texts
    finally:
        _listener.reset(token)


@dataclass(frozen=True, slots=True)
class Alarm:
    """What a program can report beside its outputs: alarm `i` of a program is the number `i + 1`."""

    kind: str  # "index" | "nonfinite" | "refused"
    node: str
    operator: str
    input: str = ""
    axis: int | None = None
    size: int | None = None
    message: str = ""

    def error(self) -> TransmuterError:
        """The exception that the alarm stands for."""
        if self.kind == "refused":
            return OperatorError(
                f"{self.operator} {self.node!r}: {self.message}", node=self.node, operator=self.operator
            )
        if self.kind == "nonfinite":
            return NonFiniteError(
                f"{self.operator} {self.node!r} gave NaN or infinity. Look at its inputs with transmuter compare, "
                'or run with nonfinite="ignore".',
                node=self.node,
            )
        return out_of_range(self.node, self.operator, self.input, self.axis, self.size, None)

    def warn(self) -> None:
        """Warn instead, as `nonfinite="warn"` asks for; or tell whoever listens in this thread (see `heard`)."""
        text, listener = str(self.error()), _listener.get()
        if listener is None:
            warnings.warn(text, NonFiniteWarning, stacklevel=2)
        else:
            listener.append(text)


def out_of_range(
    node: str, operator: str, input: str, axis: int | None, size: int | None, value: int | None
) -> IndexOutOfRange:
    """The error of an index that is out of range; `value` is the index where it is known."""
    where = "" if axis is None else f" on axis {axis}"
    allowed = f"allowed are {-size} to {size - 1}" if size else "nothing can be taken from it"
    limit = "" if size is None else f" of size {size} ({allowed})"
    what = "an index" if value is None else f"index {value}"
    return IndexOutOfRange(
        f"{operator} {node!r}: {what} in {input!r} is out of range{where}{limit}. "
        'Check the ids that go in (a tokenizer of another model?), or compile with bounds="clamp".',
        node=node,
        input=input,
        axis=axis,
        size=size,
    )
