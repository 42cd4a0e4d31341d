"""The watches of conftest see what they are there for."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from anyio import to_thread

from tests.conftest import STEP_LIMIT, STEPS


@pytest.fixture
def longest() -> Iterator[Callable[[], float]]:
    """The longest step so far; what these tests burn on purpose is forgotten at their end."""
    STEPS.reset()
    yield lambda: STEPS.longest
    STEPS.reset()


def burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_step_that_computes_is_seen(longest: Callable[[], float]) -> None:
    async def main() -> None:
        burn(1.5 * STEP_LIMIT)
        await trio.lowlevel.checkpoint()

    trio.run(main)
    assert longest() > 1.4 * STEP_LIMIT


def test_so_is_one_in_a_loop_of_another_thread(longest: Callable[[], float]) -> None:
    async def inner() -> None:
        burn(1.5 * STEP_LIMIT)

    async def main() -> None:
        await to_thread.run_sync(lambda: trio.run(inner))

    trio.run(main)
    assert longest() > 1.4 * STEP_LIMIT


def test_garbage_collection_and_other_threads_are_not_counted(longest: Callable[[], float]) -> None:
    class Slow:
        """A cycle whose end takes time."""

        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            burn(2 * STEP_LIMIT)

    async def main() -> None:
        Slow()
        gc.collect()
        thread = threading.Thread(target=burn, args=(2 * STEP_LIMIT,))
        thread.start()
        thread.join()
        await trio.lowlevel.checkpoint()

    trio.run(main)
    assert longest() < STEP_LIMIT


BURNING = """
import anyio, pytest
from tests.test_watches import STEP_LIMIT, STEPS, burn

trio_only = pytest.mark.parametrize("anyio_backend", [("trio", {"instruments": [STEPS]})], ids=["trio"])
RUNS = []

@trio_only
async def test_once():
    RUNS.append("once")
    burn(1.5 * STEP_LIMIT if RUNS.count("once") == 1 else 0)
    await anyio.lowlevel.checkpoint()

@trio_only
async def test_each_time():
    RUNS.append("each")
    burn(1.5 * STEP_LIMIT)
    await anyio.lowlevel.checkpoint()

@pytest.fixture
async def burns():
    yield
    RUNS.append("after")
    burn(1.5 * STEP_LIMIT)

@trio_only
async def test_fixture(burns):
    pass

def test_anything_else():
    RUNS.append("else")
    assert RUNS.count("else") == 2

def test_runs():
    assert [RUNS.count(name) for name in ("once", "each", "else")] == [2, 2, 1]
"""


def test_a_step_that_was_long_by_chance_fails_no_test_and_nothing_else_runs_twice(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    file = tmp_path / "test_burning.py"
    file.write_text(BURNING)
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-c", str(pytestconfig.inipath), "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, str(file)],
        cwd=pytestconfig.rootpath, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    told = done.stdout.splitlines()
    words = [line.split() for line in told if line.startswith(("ERROR ", "FAILED ")) and "::" in line]
    ended = {(word, test.rpartition("::")[2]) for word, test, *_ in words}
    long = {("ERROR", "test_each_time[trio]"), ("ERROR", "test_fixture[trio]")}
    assert ended == long | {("FAILED", "test_anything_else")}, done.stdout + done.stderr
    assert "3 rerun" in told[-1]
    assert "ms of CPU time on the loop, the limit is 20 ms" in done.stdout
