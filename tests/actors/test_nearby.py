"""A thread whose work is short stays on the loop's core; any other keeps all of them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import pytest

from transmuter_async.actors import nearby
from transmuter_async.actors.nearby import IN_A_ROW, SHORT, Neighbour
from transmuter_async.actors.threads import Threads
from transmuter_async.bridge import current_loop

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="one core, or no affinities of threads here"
)


def allowed() -> set[int]:
    """The cores of the thread that asks."""
    return os.sched_getaffinity(0)


async def works(threads: Threads, times: int) -> set[int]:
    """Cores of the thread in the last of several short works."""
    for _ in range(times):
        found = await threads.run(allowed)
    return found


@pytest.fixture
def length(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether what follows is short work, however long it takes on the machine of the test."""
    return lambda short: monkeypatch.setattr(nearby, "SHORT", 10**12 if short else -1)


async def test_short_work_comes_to_the_loop_and_longer_work_is_free_again(length: Callable[[bool], None]) -> None:
    threads = Threads(current_loop(), "near", 1, near=True)
    try:
        length(True)
        assert await works(threads, IN_A_ROW) == allowed(), "too early"
        near = await works(threads, 2)
        assert len(near) == 1
        assert near < allowed(), "the loop itself is bound to nothing"
        length(False)
        await works(threads, 1)
        assert await works(threads, 1) == allowed()
        length(True)
        assert await works(threads, IN_A_ROW) == allowed(), "one short work after a long one is no habit"
        assert len(await works(threads, 2)) == 1
    finally:
        threads.close()
        await threads.wait_ended()


async def test_the_thread_follows_the_loop(length: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = sorted(allowed())[:2]
    threads = Threads(current_loop(), "follows", 1, near=True)
    try:
        length(True)
        monkeypatch.setattr(nearby, "_current_core", lambda: first)
        assert await works(threads, IN_A_ROW + 2) == {first}
        monkeypatch.setattr(nearby, "_current_core", lambda: second)
        assert await works(threads, 2) == {second}
        length(False)
        assert await works(threads, 2) == allowed(), "all that it had at first, not what it had last"
    finally:
        threads.close()
        await threads.wait_ended()


@pytest.mark.parametrize(("limit", "near"), [(2, True), (1, False)], ids=["several are there to use several", "may start others"])
async def test_other_threads_keep_their_cores(length: Callable[[bool], None], limit: int, near: bool) -> None:
    threads = Threads(current_loop(), "free", limit, near=near)
    try:
        length(True)
        assert await works(threads, IN_A_ROW * 3) == allowed()
    finally:
        threads.close()
        await threads.wait_ended()


async def test_a_core_that_is_taken_away_harms_nobody(
    length: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearby, "_current_core", lambda: 10**6)
    threads = Threads(current_loop(), "gone", 1, near=True)
    try:
        length(True)
        assert await works(threads, IN_A_ROW + 3) == allowed()
    finally:
        threads.close()
        await threads.wait_ended()


def test_one_long_work_is_enough_and_does_not_count_as_several() -> None:
    neighbour, thread = Neighbour(), threading.current_thread()
    before = allowed()
    try:
        for _ in range(IN_A_ROW - 1):
            neighbour.took(SHORT)
        neighbour.follow(thread)
        assert allowed() == before
        neighbour.took(SHORT)
        neighbour.follow(thread)
        assert len(allowed()) == 1
        neighbour.took(SHORT + 1)
        assert allowed() == before
        neighbour.follow(thread)
        assert allowed() == before
    finally:
        os.sched_setaffinity(0, before)
