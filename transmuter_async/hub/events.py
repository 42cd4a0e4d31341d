"""What the Hub client tells the bus: `hub.hit`, `hub.download`, `hub.info`. Everything stands behind a guard."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, Protocol

from transmuter_async.telemetry import Telemetry

__all__ = ["Check", "Events", "Progress", "Record"]

Check = Literal["etag", "hash", "none", "offline"]
_PROGRESS_INTERVAL = 100_000_000  # ns: at most 10 per second and file


class Record(Protocol):
    """What is filled in while a span is open; its stop carries it."""

    id: int
    metadata: dict[str, object]
    measurements: dict[str, int | float]


@dataclass(slots=True)
class _Unheard:
    """A span that nobody listens to."""

    id: int = 0
    metadata: dict[str, object] = field(default_factory=dict)
    measurements: dict[str, int | float] = field(default_factory=dict)


class Progress:
    """Tells how many bytes of a file are on the disk, at most ten times a second."""

    __slots__ = ("_bus", "_metadata", "_next")

    def __init__(self, bus: Telemetry, metadata: dict[str, object]) -> None:
        self._bus = bus
        self._metadata = metadata
        self._next = 0

    def __call__(self, done: int, total: int | None) -> None:
        """Tell it, unless the last time was just now."""
        if self._bus.wants("transmuter.hub.download.progress"):
            now = time.monotonic_ns()
            if now >= self._next:
                self._next = now + _PROGRESS_INTERVAL
                measurements = {"bytes": done, "total": total if total is not None else done}
                self._bus.emit("transmuter.hub.download.progress", measurements, self._metadata)


class Events:
    """The events of one load of one repository at one revision, as asked for."""

    __slots__ = ("_bus", "_repo", "_revision")

    def __init__(self, bus: Telemetry, repo: str, revision: str) -> None:
        self._bus = bus
        self._repo = repo
        self._revision = revision

    def hit(self, file: str, size: int, check: Check) -> None:
        """A file is in the cache and current."""
        if self._bus.wants("transmuter.hub.hit"):
            self._bus.emit("transmuter.hub.hit", {"count": 1, "bytes": size}, {**self._file(file), "check": check})

    def info(self) -> AbstractContextManager[Record]:
        """A span around the request for the metadata; `metadata["result"]` is filled in by the caller."""
        return self._span("transmuter.hub.info", {"source": ("hf", self._repo), "revision": self._revision})

    def download(self, file: str) -> AbstractContextManager[Record]:
        """A span around a download; `measurements["bytes"]` is filled in by the caller."""
        return self._span("transmuter.hub.download", self._file(file))

    def progress(self, file: str, span: Record) -> Progress:
        """A callable that emits the progress of a download."""
        return Progress(self._bus, {**self._file(file), "span": span.id})

    def _file(self, file: str) -> dict[str, object]:
        return {"source": ("hf", self._repo, file), "revision": self._revision}

    def _span(self, name: str, metadata: dict[str, object]) -> AbstractContextManager[Record]:
        # Who listens is decided when the span starts; a span is told whole or not at all.
        if any(self._bus.wants(f"{name}.{part}") for part in ("start", "stop", "exception", "progress")):
            return self._bus.span(name, metadata)
        return nullcontext(_Unheard())
