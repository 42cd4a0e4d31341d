"""The client's threads: everything that blocks on the disk, or hashes, happens in one of them.

A hop is *always waited for*, also when the caller is cancelled: a thread that still writes must not meet a closed file. Long hops (hashing)
are given a `Stop` that they look at, so that a cancellation is still prompt. The pool belongs to one client and ends with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, ParamSpec, TypeVar

import anyio

from transmuter_async.bridge import Loop, current_loop

__all__ = ["Hop", "Stop", "Stopped", "Workers"]

T = TypeVar("T")
P = ParamSpec("P")


class Stopped(Exception):
    """A long hop saw that its caller has gone."""


class Stop:
    """Set when the caller of a long hop is cancelled."""

    __slots__ = ("_flag",)

    def __init__(self) -> None:
        self._flag = threading.Event()

    def set(self) -> None:
        """Ask the hop to end."""
        self._flag.set()

    def check(self) -> None:
        """Ends the hop if its caller has gone.

        Raises:
            Stopped: It has.
        """
        if self._flag.is_set():
            raise Stopped


class Hop(Generic[T]):
    """A function that runs in a thread, started already."""

    __slots__ = ("_done", "_future", "_stop")

    def __init__(self, future: Future[T], loop: Loop, stop: Stop | None) -> None:
        self._future = future
        self._done = anyio.Event()
        self._stop = stop
        future.add_done_callback(lambda _: loop.post(self._done.set))

    async def result(self) -> T:
        """What the function returned or raised. A cancellation is delivered after the function has ended, not before."""
        cancelled: BaseException | None = None
        if self._stop is not None:
            try:
                await self._done.wait()
            except anyio.get_cancelled_exc_class() as error:
                cancelled = error
                self._stop.set()
        # The shield holds off anyio's cancellation; a plain `task.cancel()` of asyncio comes through it and is kept for later.
        with anyio.CancelScope(shield=True):
            while not self._done.is_set():
                try:
                    await self._done.wait()
                except anyio.get_cancelled_exc_class() as error:
                    cancelled = cancelled or error
        if cancelled is not None:
            raise cancelled
        return self._future.result()


class Workers:
    """A few threads of one client. Made and used in one event loop."""

    def __init__(self, threads: int) -> None:
        self.executor = ThreadPoolExecutor(threads, thread_name_prefix="transmuter-hub")
        self._loop = current_loop()

    def start(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Hop[T]:
        """Starts `function` in a thread; the caller must await `result()` of the hop."""
        return Hop(self.executor.submit(function, *args, **kwargs), self._loop, None)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a short function in a thread."""
        return await self.start(function, *args, **kwargs).result()

    async def run_long(self, function: Callable[..., T], *args: object) -> T:
        """Runs `function(*args, stop)` in a thread; it must call `stop.check()` often. A cancellation stops it."""
        stop = Stop()
        return await Hop(self.executor.submit(function, *args, stop), self._loop, stop).result()

    async def aclose(self) -> None:
        """Ends the threads. Waits for what still runs, without blocking the loop."""
        done = anyio.Event()

        def close() -> None:
            self.executor.shutdown(wait=True)
            self._loop.post(done.set)

        threading.Thread(target=close, name="transmuter-hub-close").start()
        with anyio.CancelScope(shield=True):
            await done.wait()
