"""From a thread to a loop: order, coalescing, an ended loop."""

from __future__ import annotations

import threading

import anyio
import pytest

from transmuter_async.bridge import Loop, Waker, current_loop, current_loop_or_none, is_cancellation
from transmuter_async.errors import MisuseError


async def test_posts_from_a_thread_arrive_in_order() -> None:
    loop, seen, done = current_loop(), [], anyio.Event()

    def work() -> None:
        for number in range(100):
            assert loop.post(seen.append, number)
        loop.post(done.set)

    thread = threading.Thread(target=work)
    thread.start()
    with anyio.fail_after(5):
        await done.wait()
    thread.join()
    assert seen == list(range(100))


async def test_wakes_between_two_turns_are_one_call() -> None:
    calls = []
    waker = Waker(current_loop(), lambda: calls.append(threading.get_ident()))
    for _ in range(50):
        assert waker.wake()
    await anyio.wait_all_tasks_blocked()
    assert calls == [threading.get_ident()]
    waker.wake()
    await anyio.wait_all_tasks_blocked()
    assert len(calls) == 2


async def test_a_loop_knows_itself() -> None:
    loop = current_loop()
    assert loop.is_current()
    assert loop == current_loop()
    assert hash(loop) == hash(current_loop())
    outside = []
    thread = threading.Thread(target=lambda: outside.append(loop.is_current()))
    thread.start()
    thread.join()
    assert outside == [False]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_ended_loop_refuses(backend: str) -> None:
    async def main() -> Loop:
        return current_loop()

    loop = anyio.run(main, backend=backend)
    assert loop.backend == backend
    assert loop.post(print) is False
    assert Waker(loop, lambda: None).wake() is False


def test_outside_of_any_loop() -> None:
    assert current_loop_or_none() is None
    with pytest.raises(MisuseError, match="none is running in this thread"):
        current_loop()


async def test_cancellation_is_told_from_errors_in_any_thread() -> None:
    caught: list[BaseException] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.sleep_forever()
        except BaseException as error:
            caught.append(error)
            raise
    answers: list[bool] = []

    def ask() -> None:
        answers.extend((is_cancellation(caught[0]), is_cancellation(ValueError())))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert answers == [True, False]
