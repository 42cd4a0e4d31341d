"""A display of downloads on a terminal's standard error, drawn from the telemetry."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from transmuter_async.cli.output import Output, size
from transmuter_async.telemetry import Event, Subscription, Telemetry

__all__ = ["Board", "downloads"]


class Board:
    """What is shown: a line for all of it (files done, bytes on the disk, rate), and one for each file that is on its way.

    Bytes are those on the disk, with what an earlier download has left; the rate is that of what comes now.

    Attributes:
        progress: The display; whoever made the board starts and stops it.
    """

    def __init__(self, console: Console, text: str) -> None:
        name = Column(no_wrap=True, overflow="ellipsis", ratio=1, min_width=12)
        self.progress = Progress(
            # No markup: a file may be called "[/x]".
            TextColumn("{task.description}", markup=False, table_column=name),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[bytes]}", markup=False, justify="right"),
            TextColumn("{task.fields[rate]}", markup=False, justify="right"),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            transient=True,
        )
        self._all = self.progress.add_task(_shown(text), total=None, note="", bytes="", rate="")
        self._downloads: dict[int, _Download] = {}
        self._rate = _Rate()
        self._files = self._done = 0

    def take(self, event: Event) -> None:
        """Show an event of the Hub."""
        name = event.name.removeprefix("transmuter.hub.")
        if name == "hit":
            self._files, self._done = self._files + 1, self._done + 1
        elif name.startswith("download."):
            self._download(name, event.metadata["span"], event)
        self.progress.update(self._all, note=f"{self._done}/{self._files} files" if self._files else "")

    def _download(self, name: str, span: int, event: Event) -> None:
        if span not in self._downloads:
            file = _shown(event.metadata["source"][-1])
            self._downloads[span] = _Download(self.progress.add_task(file, total=None, note="", bytes="", rate=""))
            self._files += 1
        download = self._downloads[span]
        if "bytes" in event.measurements:
            download.there = int(event.measurements["bytes"])
            download.size = int(event.measurements.get("total", download.there))
            if download.began is None:
                download.began = download.there  # with what an earlier download has left: no part of the rate
            self._draw(download.line, download.there, download.size, download.rate.after(download.there))
            every = self._downloads.values()
            came = sum(each.there - (each.began or 0) for each in every)
            whole = sum(each.size for each in every)
            self._draw(self._all, sum(each.there for each in every), whole, self._rate.after(came))
        if name == "download.stop":
            self._done += 1
        if name in ("download.stop", "download.exception"):
            self.progress.update(download.line, visible=False)

    def _draw(self, line: TaskID, there: int, whole: int, rate: str) -> None:
        self.progress.update(line, completed=there, total=whole, bytes=f"{size(there)} of {size(whole)}", rate=rate)


class _Rate:
    """Bytes per second over the last seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=50)

    def after(self, count: int) -> str:
        """The rate, now that so many bytes have come."""
        now = time.monotonic()
        self._samples.append((now, count))
        began, first = self._samples[0]
        return f"{size((count - first) / (now - began))}/s" if now > began and count > first else ""


@dataclass(slots=True)
class _Download:
    """A file: its line, the bytes that are there, those of the whole, and those that were there when it was first told."""

    line: TaskID
    there: int = 0
    size: int = 0
    began: int | None = None
    rate: _Rate = field(default_factory=_Rate)


@asynccontextmanager
async def downloads(telemetry: Telemetry, output: Output, text: str) -> AsyncIterator[None]:
    """Show `text`, and the downloads that happen while the block runs. Nothing with `--json`, or where nobody looks."""
    if output.json or not sys.stderr.isatty():
        yield
        return
    async with telemetry.subscribe("transmuter.hub") as events, anyio.create_task_group() as group:
        group.start_soon(_show, events, Board(Console(stderr=True), text))
        yield
        events.finish()


async def _show(events: Subscription, board: Board) -> None:
    with board.progress:
        async for event in events:
            board.take(event)


def _shown(text: Any) -> str:
    """A name from elsewhere, without what moves the cursor or turns the writing around."""
    return "".join(character if character.isprintable() else "?" for character in str(text))
