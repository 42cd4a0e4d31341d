"""The watches of conftest see what they are there for."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator

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
