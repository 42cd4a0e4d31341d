"""What a serving is told, and what it tells: plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["ServingOptions", "ServingStatistics"]


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """The words of `Runtime.serve`.

    Attributes:
        batch_size: Rows of the largest batch, or the batch sizes to compile for; None: the largest bucket of the batch
            dimension, else 32.
        batch_timeout: Seconds that a row waits for others at most, while the model is busy and could take one more batch.
        max_padded: Elements of a batch after padding: rows × the padded sizes of a row (tokens, for text). None: no bound.
        queue_size: Rows that may wait.
        timeout: Seconds until a caller loses patience, where `run` does not say; None: never.
        concurrency: Batches in flight; None: as many calls as the model computes at once.

    Raises:
        ValueError: A number that makes no sense.
    """

    batch_size: int | Sequence[int] | None = None
    batch_timeout: float = 0.005
    max_padded: int | None = None
    queue_size: int = 1024
    timeout: float | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.batch_timeout < math.inf:
            raise ValueError(f"batch_timeout={self.batch_timeout} must be a number of seconds, at least 0")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout} must be positive, or None")
        for name in ("max_padded", "queue_size", "concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")


@dataclass(frozen=True, slots=True)
class ServingStatistics:
    """Counts of a serving since it started, restarts included.

    Attributes:
        ready: Whether `warm` has compiled everything, and its trial agreed.
        warm_failure: What the last `warm` failed with, in words; None when it did not, or was not called.
        batch: Name of the batch dimension.
        batch_sizes: Rows that programs are compiled for.
        requests: Requests that were accepted, and
        rows: the rows in them.
        answered: Requests that got their result.
        failed: Requests that got an error.
        cancelled: Requests whose caller left first.
        expired: Requests whose deadline passed first.
        rejected: Requests that were refused: no room, or an open breaker.
        batches: Batches that ran.
        batch_rows: Rows of data in them.
        padded: Share of all their elements that was padding.
        retried: Batches that failed and were tried row by row.
        waiting: Rows that wait now.
        queues: Of these, how many in each bucket.
        waiting_for_room: Requests in front of the full queue.
        running: Batches in flight.
        breaker: "closed", "open", or "half-open".
        opened: Times that the breaker opened.
        restarts: Times that the worker started again after a crash.
    """

    name: str
    state: str
    ready: bool
    warm_failure: str | None
    batch: str
    batch_sizes: tuple[int, ...]
    concurrency: int
    queue_size: int
    requests: int
    rows: int
    answered: int
    failed: int
    cancelled: int
    expired: int
    rejected: int
    batches: int
    batch_rows: int
    padded: float
    retried: int
    waiting: int
    queues: Mapping[str, int]
    waiting_for_room: int
    running: int
    breaker: str
    opened: int
    restarts: int

    @property
    def mean_batch(self) -> float:
        """Rows of data in a batch, on average."""
        return self.batch_rows / self.batches if self.batches else 0.0
