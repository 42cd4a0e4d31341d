"""What every test stands on: both event loops, watches for a blocked loop, and a count of compiles.

An async test runs on asyncio and on trio; marked slow, also on asyncio with eager tasks (Python 3.12) and on uvloop where it
is installed.
jax is told its platform before anything imports it, and its persistent cache is off: it would hide compiles.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# An own locale is not at hand everywhere, and onnxruntime's StringNormalizer insists on one.
os.environ.setdefault("LC_ALL", "C.UTF-8")
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it puts into the background deaf to Ctrl-C, and programs that tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax
import pytest
import trio

from transmuter_async import telemetry

try:
    from blockbuster import BlockBuster
except ImportError:  # not on every implementation
    BlockBuster = None

COMPILED_BY_JAX = "/jax/core/compile/backend_compile_duration"
TOLD_BY_US = "transmuter.segment.compile.stop"
COMPILE_THEMSELVES = ("conformance", "operators", "compiler", "properties", "benchmarks")
"""Folders whose tests compile without an actor, hence without events."""
OUTCOME = pytest.StashKey[bool]()

STEP_LIMIT = 0.02
"""Seconds of CPU time, garbage collection left out, that one step of a trio task may use."""


class StepWatch(trio.abc.Instrument):
    """Keeps the longest step of any trio task since the last `reset`, in CPU seconds of the loop's thread.

    CPU time and not the clock: other processes share the cores, and a step that waits for the processor blocks nobody by
    itself. Waiting for a lock or a file is what blockbuster sees on asyncio, in the same tests. Collections of garbage are
    left out: they come when they come, and the collector belongs to the application.
    """

    def __init__(self) -> None:
        self.reset()
        self._here = threading.local()  # a test may run a second loop in a thread
        gc.callbacks.append(self._collects)

    def reset(self) -> None:
        self.longest = 0.0
        self.where = ""

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._here.collected = 0.0
        self._here.began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        seconds = time.thread_time() - self._here.began - self._here.collected
        if seconds > self.longest:
            self.longest, self.where = seconds, task.name

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._here.collection = time.thread_time()
        elif hasattr(self._here, "collected"):
            self._here.collected += time.thread_time() - self._here.collection


STEPS = StepWatch()


def watched_run(*arguments: Any, instruments: Sequence[trio.abc.Instrument] = (), **options: Any) -> Any:
    """`trio.run` with the watch in it, for tests that start a loop by themselves."""
    return run_trio(*arguments, instruments=(*instruments, STEPS), **options)


run_trio, trio.run = trio.run, watched_run


def eager_loop() -> asyncio.AbstractEventLoop:
    """A loop whose tasks run at once until their first wait."""
    loop = asyncio.new_event_loop()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
    return loop


def backends() -> list[Any]:
    """The event loops of this machine, as parameters of `anyio_backend`."""
    found: list[Any] = [pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio")]
    more = pytest.mark.slow  # one asyncio will do where time is short
    if sys.version_info >= (3, 12):
        found.append(pytest.param(("asyncio", {"loop_factory": eager_loop}), id="asyncio-eager", marks=more))
    try:
        import uvloop
    except ImportError:
        pass
    else:
        found.append(pytest.param(("asyncio", {"loop_factory": uvloop.new_event_loop}), id="uvloop", marks=more))
    found.append(pytest.param(("trio", {"instruments": [STEPS]}), id="trio"))
    return found


@pytest.fixture(params=backends(), scope="module")
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(autouse=True)
def unblocked_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test in which the event loop is blocked: blockbuster on asyncio, the step watch on trio.

    By the watch's words, which `--only-rerun` in pyproject.toml looks for, the test runs once more and fails if a step is long
    again: what blocks a loop does so each time, but on a virtual machine a thread is also charged for what its host does
    meanwhile, such as fetching a page of memory or a core that was lent out.
    """
    with ExitStack() as stack:
        if "anyio_backend" in request.fixturenames and BlockBuster is not None:
            name, _ = request.getfixturevalue("anyio_backend")
            if name == "asyncio":
                watch = BlockBuster(scanned_modules=["transmuter_async"])
                watch.activate()
                stack.callback(watch.deactivate)
        STEPS.reset()
        yield
    if STEPS.longest > STEP_LIMIT:
        pytest.fail(
            f"a step of the trio task {STEPS.where!r} used {STEPS.longest * 1e3:.1f} ms of CPU time on the loop, "
            f"the limit is {STEP_LIMIT * 1e3:g} ms"
        )


class Compiles:
    """Counts XLA compiles twice: those that jax reports, and those that our events tell, on whatever bus.

    It listens as a subscription of every bus would, but to the one name only, so that no other event costs more.
    """

    def __init__(self) -> None:
        self.reset()
        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        routes: Any = telemetry._Routes
        found = routes.__missing__

        def missing(table: Any, name: str) -> tuple[Any, ...]:
            subscriptions: tuple[Any, ...] = found(table, name)
            if name in (TOLD_BY_US, "transmuter.segment.compile.*"):
                subscriptions = table[name] = (*subscriptions, self)
            return subscriptions

        routes.__missing__ = missing

    def reset(self) -> None:
        self.by_jax: list[dict[str, Any]] = []
        self.told: list[telemetry.Event] = []

    def _compiled(self, event: str, duration: float, **facts: Any) -> None:
        if event == COMPILED_BY_JAX:
            self.by_jax.append(facts)

    full = False

    def offer(self, event: telemetry.Event) -> None:
        if event.metadata["compiled"] and event.metadata["disk_cache"] != "hit":
            self.told.append(event)


COMPILES = Compiles()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folders = item.path.relative_to(item.config.rootpath).parts
        if any(folder in COMPILE_THEMSELVES for folder in folders):
            item.add_marker(pytest.mark.compiles_itself)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call":
        item.stash[OUTCOME] = report.passed
    return report


@pytest.fixture(autouse=True)
def honest_compiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test in which jax compiled more, or less, than our events say: no compile is hidden."""
    COMPILES.reset()
    yield
    if request.node.get_closest_marker("compiles_itself") or not request.node.stash.get(OUTCOME, False):
        return
    if len(COMPILES.by_jax) != len(COMPILES.told):
        told = [(event.metadata["position"], event.metadata["shapes"]) for event in COMPILES.told]
        pytest.fail(f"jax compiled {len(COMPILES.by_jax)} programs: {COMPILES.by_jax}; our events tell of {told}")
