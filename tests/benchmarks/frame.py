"""The frame of all benchmarks: named figures, which may have a bound, and the functions that measure them.

A module of this folder has functions marked with `@benchmark`; each gives figures. `python -m tests.benchmarks` finds them,
runs each in a process of its own, so that neither memory nor programs of one are those of another, and prints a table.

    @benchmark
    def lengths() -> Iterator[Figure]:
        yield Figure("a call against a bare call", 1.7, "×", bound=2)

An async function is run once on asyncio and once on trio, and its figures carry the loop's name. A function marked with
`@each(subjects)` is a benchmark of its own for each of them, named `module.subject`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import anyio
import pytest

__all__ = ["QUICK", "Benchmark", "Figure", "benchmark", "best", "each", "find", "only_in_full", "quick"]

Measure = Callable[[], Iterator["Figure"]] | Callable[[], AsyncIterator["Figure"]]
F = TypeVar("F", bound=Callable[..., Any])

LOOPS = ("asyncio", "trio")
QUICK = "TRANSMUTER_BENCH_QUICK"
"""The environment variable that `--quick` sets for the processes of the benchmarks."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number.

    Attributes:
        name: What was measured, in words; unique within its benchmark.
        value: The number.
        unit: Its unit: "µs", "MB", "×" for a ratio.
        bound: What it must not be above, None where it is only stated.
        least: The bound is what it must not be below.
        note: What one must know to read it.
    """

    name: str
    value: float
    unit: str
    bound: float | None = None
    least: bool = False
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether it keeps its bound; one without a bound does."""
        if self.bound is None:
            return True
        return self.value >= self.bound if self.least else self.value <= self.bound

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**asdict(self), "met": self.met}


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A function that measures; `name` is `module.function`, `title` the first line of its docstring."""

    name: str
    title: str
    measure: Measure

    def run(self) -> Iterator[Figure]:
        """Its figures as they come; an async one's on both loops."""
        if inspect.isasyncgenfunction(self.measure):
            for loop in LOOPS:
                for figure in anyio.run(_gather, self.measure, backend=loop):
                    yield Figure(**{**asdict(figure), "name": f"{figure.name} ({loop})"})
        else:
            yield from self.measure()  # type: ignore[misc]


async def _gather(measure: Callable[[], AsyncIterator[Figure]]) -> list[Figure]:
    return [figure async for figure in measure()]


def benchmark(function: F) -> F:
    """Mark a function without arguments that gives figures."""
    function.is_benchmark = True  # type: ignore[attr-defined]
    return function


def each(subjects: Mapping[str, Any]) -> Callable[[F], F]:
    """Mark a function that takes one of `subjects`: each is a benchmark of its own. Two such functions of a module need other names.

    The first line of the docstring is the title, with `{}` for the subject's name.
    """

    def mark(function: F) -> F:
        function.subjects = dict(subjects)  # type: ignore[attr-defined]
        return function

    return mark


def quick() -> bool:
    """Whether a short run was asked for: few calls, small sizes."""
    return bool(os.environ.get(QUICK))


def only_in_full() -> None:
    """Skip this benchmark in a short run."""
    if quick():
        pytest.skip("left out by --quick")


def _benchmarks(module: str) -> Iterator[Benchmark]:
    for name, function in vars(importlib.import_module(f"tests.benchmarks.{module}")).items():
        title = (inspect.getdoc(function) or name).splitlines()[0]
        if getattr(function, "is_benchmark", False):
            yield Benchmark(f"{module}.{name}", title, function)
        for subject, value in getattr(function, "subjects", {}).items():
            yield Benchmark(f"{module}.{subject}", title.format(subject), partial(function, value))


def find(names: tuple[str, ...] | list[str] = ()) -> list[Benchmark]:
    """All benchmarks, or those of the modules and `module.function`s that are named.

    Raises:
        LookupError: A name is neither.
    """
    package = importlib.import_module("tests.benchmarks")
    modules = sorted(each.name for each in pkgutil.iter_modules(package.__path__) if not each.name.startswith("_"))
    wanted = {name.partition(".")[0] for name in names}
    if strangers := wanted - set(modules):
        raise LookupError(f"no benchmarks of the name {sorted(strangers)}; there are {modules}")
    found = [each for module in modules if not names or module in wanted for each in _benchmarks(module)]
    chosen = [each for each in found if not names or {each.name, each.name.partition(".")[0]} & set(names)]
    if unknown := [n for n in names if not any(each.name == n or each.name.startswith(f"{n}.") for each in chosen)]:
        raise LookupError(f"no benchmarks of the name {unknown}; there are {[each.name for each in found]}")
    return chosen


def best(call: Callable[[], Any], rounds: int = 7, calls: int = 1) -> float:
    """Seconds per call, the best of several rounds: what the machine does when nobody else wants it."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - began) / calls)
    return min(times)
