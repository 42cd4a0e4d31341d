"""What the scheduler is told and what it decides: frozen values."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

__all__ = ["Batch", "Limits", "Part", "Request"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the batches.

    Attributes:
        batch_sizes: Rows that programs are compiled for, ascending. A batch runs in the smallest that holds it.
        timeout: Nanoseconds after which the oldest part waits no longer for others.
        max_padded: Elements of a batch after padding; None for no bound. The smallest program is always allowed.
        queue_size: Rows that may wait in the queues.
        concurrency: Batches that run at once.
    """

    batch_sizes: tuple[int, ...]
    timeout: int
    max_padded: int | None
    queue_size: int
    concurrency: int

    def rows(self, elements: int) -> int:
        """Rows of a full batch whose rows have so many elements each."""
        if self.max_padded is None:
            return self.batch_sizes[-1]
        fitting = [size for size in self.batch_sizes if size * elements <= self.max_padded]
        return fitting[-1] if fitting else self.batch_sizes[0]

    @property
    def share(self) -> int:
        """Rows of maps that may wait: three quarters of the queue. The rest is kept for everybody else."""
        return self.queue_size - max(1, self.queue_size // 4)

    def program(self, rows: int) -> int:
        """The rows of the program that a batch of `rows` runs in."""
        return next((size for size in self.batch_sizes if size >= rows), rows)


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody asks for.

    Attributes:
        id: Of the request, unique.
        key: Of its queue: only requests of one key run together.
        rows: How many.
        elements: Of one row after padding, for the budget.
        arrived: When.
        deadline: When nobody wants the answer any more; None for never.
        caller: Who shares its turns with whom; None: a caller of its own.
        alone: Runs by itself and as it is.
        bulk: One of a source of many, which may not take all the room.
    """

    id: int
    key: Hashable
    rows: int
    elements: int
    arrived: int
    deadline: int | None = None
    caller: Hashable = None
    alone: bool = False
    bulk: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """Rows `start` to `start + rows` of a request."""

    request: int
    start: int
    rows: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A decision: run these together.

    Attributes:
        id: Of the batch, unique.
        key: Of the queue that it comes from.
        parts: In the order of their rows.
        rows: Of data.
        program: Rows that the program has; the rest is filled up.
        depth: Rows that are left waiting, in all queues.
        oldest: Nanoseconds that its oldest part has waited.
        reason: Why now: "full", "timeout", "idle", or "drain".
        probe: Whether the breaker waits for its outcome.
    """

    id: int
    key: Hashable
    parts: tuple[Part, ...]
    rows: int
    program: int
    depth: int
    oldest: int
    reason: str
    probe: bool = False
