"""What a command prints: rich on a terminal, plain lines and tabs into a pipe, one JSON object with `--json`."""

from __future__ import annotations

import json as encoder
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["Output", "plain", "seconds", "size"]


def plain(value: Any) -> Any:
    """`value` as JSON knows it: arrays are lists, dtypes and paths their names, NaN and infinities words."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)


def seconds(nanoseconds: float) -> str:
    """A duration for people: `1.53 s`, `12.4 ms`, `85 µs`."""
    if nanoseconds >= 1e9:
        return f"{nanoseconds / 1e9:.2f} s"
    if nanoseconds >= 1e6:
        return f"{nanoseconds / 1e6:.1f} ms"
    return f"{nanoseconds / 1e3:.0f} µs"


def size(count: float) -> str:
    """Bytes for people, in powers of ten: `23.1 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


class Output:
    """Where a command writes. With `json`, texts are dropped and `data` is printed once, at the end."""

    def __init__(self, *, json: bool = False) -> None:
        self.json = json
        self.data: dict[str, Any] = {}
        self._problem = False
        self.terminal = sys.stdout.isatty() and not json
        self._console = Console(highlight=False) if self.terminal else None

    def line(self, text: str = "", *, style: str | None = None) -> None:
        """One line of text."""
        if self._console is not None:
            self._console.print(escape(text), style=style, soft_wrap=True)
        elif not self.json:
            print(text)

    def heading(self, text: str) -> None:
        """A line above what follows."""
        self.line(text, style="bold")

    def fields(self, pairs: Mapping[str, object]) -> None:
        """Names and values, one pair a line."""
        width = max((len(name) for name in pairs), default=0)
        for name, value in pairs.items():
            self.line(f"  {name:<{width}}  {value}" if self.terminal else f"{name}\t{value}")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[str] = ()) -> None:
        """A table; columns named in `right` are numbers."""
        if self._console is not None:
            table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2))
            aligned = set(right)
            for column in columns:
                table.add_column(column, justify="right" if column in aligned else "left", overflow="fold")
            for row in rows:
                table.add_row(*(escape(str(cell)) for cell in row))
            self._console.print(table)
        elif not self.json:
            print(*columns, sep="\t")
            for row in rows:
                print(*row, sep="\t")

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """A moving line on a terminal's standard error while the block runs; nothing elsewhere."""
        if self.json or not sys.stderr.isatty():
            yield
            return
        with Console(stderr=True).status(escape(text)):
            yield

    def problem(self, text: str, *, kind: str | None = None) -> None:
        """An error, on standard error; with `--json` as an object on standard output."""
        if self.json:
            self._problem = True
            print(encoder.dumps({"error": text, "kind": kind}, ensure_ascii=False))
        else:
            print(f"transmuter: {text}", file=sys.stderr)

    def flush(self) -> None:
        """Print what `--json` promises: one object, which is the problem where there was one."""
        if self.json and not self._problem:
            print(encoder.dumps(plain(self.data), ensure_ascii=False, indent=2))
        sys.stdout.flush()
