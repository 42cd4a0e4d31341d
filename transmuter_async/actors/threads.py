"""Threads that one owner feeds and waits for: where everything that takes time happens.

Why not `anyio.to_thread`: on asyncio it gives its limiter's token back when the *caller* is cancelled, not when the
thread ends, so cancelled work piles up; its limiter is the application's; and its hop is slower than a queue of our own.

`Threads` is fed on the loop only. A thread starts when there is work and no idle thread, up to the limit. What was
submitted is run once, in order, whoever still waits for it; how it ended is told on the loop, in the order of ending.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any, TypeVar

import anyio

from transmuter_async.actors.nearby import Neighbour
from transmuter_async.actors.reply import Reply
from transmuter_async.bridge import Loop

__all__ = ["Threads"]

T = TypeVar("T")
Done = Callable[[Any, BaseException | None], None]
_numbers = itertools.count(1)


class Threads:
    """Up to `limit` threads named `name`. All methods belong to the loop.

    Args:
        loop: The loop that feeds them and is told.
        name: Prefix of the threads' names.
        limit: Threads at most.
        crashed: Told, on the loop, when `done` of some work raised: the owner's own code failed.
        around: Makes the context that each thread lives in, from its first work to its last.
        near: With a limit of one, that thread stays near the loop while its work is short, see `nearby`. Only for threads that
            start no others: these would have its cores.
    """

    def __init__(
        self,
        loop: Loop,
        name: str,
        limit: int,
        *,
        crashed: Callable[[BaseException], None] | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        near: bool = False,
    ) -> None:
        self.limit = limit
        self._around = around
        self._loop = loop
        self._name = name
        self._crashed = crashed
        self._queue: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], Done] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        self._running = 0
        self._closed = False
        self._ended = anyio.Event()
        self._neighbour = Neighbour() if near and limit == 1 else None  # several are there to use several cores

    @property
    def unfinished(self) -> int:
        """Work that was submitted and has not ended."""
        return self._unfinished

    def owns(self, thread: threading.Thread) -> bool:
        """Whether `thread` is one of these. From any thread."""
        return thread in self._threads

    def submit(self, work: Callable[..., Any], *arguments: Any, done: Done) -> None:
        """Run `work(*arguments)` in a thread; then `done(result, error)` on the loop."""
        if self._closed:
            raise RuntimeError(f"the threads {self._name!r} are closed")
        self._unfinished += 1
        if self._unfinished > len(self._threads) and len(self._threads) < self.limit:
            self._start()
        elif self._neighbour is not None and self._unfinished == 1:
            self._neighbour.follow(self._threads[0])
        self._queue.put((work, arguments, done))

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """`await` the result of `work(*arguments)`. A cancelled caller leaves at once; the work then ends unheard."""
        reply: Reply[T] = Reply(self._loop)
        self.submit(work, *arguments, done=reply.settle)
        return await reply.wait()

    def close(self) -> None:
        """No more work. The threads end when they have done what was submitted."""
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._queue.put(None)
            if not self._threads:
                self._ended.set()

    async def wait_ended(self) -> None:
        """Wait until every thread has ended, after `close`."""
        await self._ended.wait()
        pause = 0.0
        while any(thread.is_alive() for thread in self._threads):
            # They have told their end as their last act; what is left of them is the interpreter's own clean-up.
            await anyio.sleep(pause)
            pause = min(pause + 0.0002, 0.005)
        self._threads.clear()

    def _start(self) -> None:
        name = f"{self._name}-{next(_numbers)}"
        # A daemon: a program that dies without leaving its runtime must not hang on threads that wait for work.
        thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._threads.append(thread)
        self._running += 1
        thread.start()

    def _main(self) -> None:
        with self._around():
            self._work()
        self._loop.post(self._thread_ended)

    def _work(self) -> None:
        post, finish, neighbour = self._loop.post, self._finish, self._neighbour
        while True:
            item = self._queue.get()
            if item is None:
                return
            began = time.perf_counter_ns()
            work, arguments, done = item
            try:
                result, error = work(*arguments), None
            except BaseException as caught:  # handed to whoever asked, whatever it is
                result, error = None, caught
            if neighbour is not None:
                neighbour.took(time.perf_counter_ns() - began)
            if not post(finish, done, result, error):
                return  # the loop has ended without a word; nobody is left to work for
            del item, work, arguments, done, result, error  # an idle thread keeps no array alive

    def _finish(self, done: Done, result: Any, error: BaseException | None) -> None:
        self._unfinished -= 1
        try:
            done(result, error)
        except Exception as caught:
            if self._crashed is None:
                raise
            self._crashed(caught)

    def _thread_ended(self) -> None:
        self._running -= 1
        if self._running == 0:
            self._ended.set()
