"""From any thread to an event loop, and nothing else: the one file that knows the loops' own tokens.

anyio has `from_thread`, but it blocks the calling thread until the loop has answered, and a memory channel must not be
fed from a foreign thread at all (asyncio does not wake its receiver, trio refuses). So a thread here *posts* a plain
function, and never waits for it:

- asyncio: `loop.call_soon_threadsafe`
- trio: `TrioToken.run_sync_soon`

A `Waker` adds that many wakes between two turns of the loop cost one post.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from anyio.lowlevel import EventLoopToken, checkpoint, current_token

from transmuter_async.errors import MisuseError

__all__ = ["Loop", "Signal", "Waker", "current_loop", "current_loop_or_none", "is_cancellation"]


class Loop:
    """An address of a running event loop: callable from any thread, comparable, never waited for.

    Attributes:
        backend: `"asyncio"` or `"trio"`.
    """

    __slots__ = ("_native", "_post", "_running", "_signal", "backend")

    def __init__(self, native: Any) -> None:
        self._native = native
        if isinstance(native, asyncio.AbstractEventLoop):
            self.backend = "asyncio"
            self._post: Callable[..., object] = native.call_soon_threadsafe
            self._running: Callable[[], Any] = asyncio._get_running_loop
            self._signal: Callable[[], Signal] = partial(_AsyncioSignal, native.create_future)
        else:
            self.backend = "trio"
            self._running = _running_trio
            self._signal = partial(_TrioSignal, sys.modules["trio"].lowlevel)
            self._post = native.run_sync_soon

    def post(self, function: Callable[..., object], *arguments: Any) -> bool:
        """Have the loop call `function(*arguments)` soon, in the order of the posts. `function` must not raise.

        Returns:
            False when the loop has ended: then nothing will be called.
        """
        try:
            self._post(function, *arguments)
        except RuntimeError:  # asyncio: "Event loop is closed"; trio.RunFinishedError is a RuntimeError, too
            return False
        return True

    def signal(self) -> Signal:
        """A `Signal` for a task of this loop."""
        return self._signal()

    def is_current(self) -> bool:
        """Whether the caller runs in this loop."""
        return self._running() is self._native

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Loop) and other._native is self._native

    def __hash__(self) -> int:
        return hash(id(self._native))

    def __repr__(self) -> str:
        return f"<Loop {self.backend}>"


def current_loop() -> Loop:
    """The loop that runs the caller.

    Raises:
        MisuseError: The caller is in no event loop.
    """
    loop = current_loop_or_none()
    if loop is None:
        raise MisuseError(
            "this must be called from a task of an asyncio or trio event loop, and none is running in this thread; "
            "start one with anyio.run, or use the function for code that is not async"
        )
    return loop


def current_loop_or_none() -> Loop | None:
    """The loop that runs the caller, None outside of any."""
    native = _native_or_none()
    return None if native is None else Loop(native)


def _native_or_none() -> Any:
    try:
        token: EventLoopToken = current_token()
    except Exception as error:
        # anyio's own error for "no loop" is newer than the oldest anyio that we run on; both derive from RuntimeError.
        if isinstance(error, RuntimeError) or type(error).__name__ in ("NoEventLoopError", "AsyncLibraryNotFoundError"):
            return None
        raise
    return token.native_token


def is_cancellation(error: BaseException) -> bool:
    """Whether `error` is the exception by which asyncio or trio cancels a task. Works in any thread."""
    if isinstance(error, asyncio.CancelledError):
        return True
    trio = sys.modules.get("trio")  # not imported: then nothing of it can have been raised
    return trio is not None and isinstance(error, trio.Cancelled)


def _running_trio() -> Any:
    trio = sys.modules["trio"]  # imported: a token of it exists
    try:
        return trio.lowlevel.current_trio_token()
    except RuntimeError:
        return None


class Signal(Protocol):
    """Set once, in the loop, for one task that waits there: the loop's own means, without a layer in between.

    `anyio.Event` does the same for any number of tasks; on the way of each call its few µs are a tenth of the whole.
    """

    def set(self) -> None:
        """Wake the task, or let its `wait` return at once. In the loop only."""

    async def wait(self) -> None:
        """Wait until it is set. Always a checkpoint."""


class _AsyncioSignal:
    __slots__ = ("_future",)

    def __init__(self, create_future: Callable[[], asyncio.Future[None]]) -> None:
        self._future = create_future()

    def set(self) -> None:
        if not self._future.done():  # a task that was cancelled has cancelled it
            self._future.set_result(None)

    async def wait(self) -> None:
        if self._future.done():
            await checkpoint()
        else:
            await self._future


class _TrioSignal:
    __slots__ = ("_set", "_task", "_trio")

    def __init__(self, lowlevel: Any) -> None:
        self._trio = lowlevel
        self._set = False
        self._task: Any = None

    def set(self) -> None:
        self._set = True
        task, self._task = self._task, None
        if task is not None:
            self._trio.reschedule(task)

    async def wait(self) -> None:
        if self._set:
            await self._trio.checkpoint()
        else:
            self._task = self._trio.current_task()
            await self._trio.wait_task_rescheduled(self._abort)

    def _abort(self, _: object) -> Any:
        self._task = None
        return self._trio.Abort.SUCCEEDED


class Waker:
    """Calls one function in a loop, at most once per turn however often it is asked to.

    The flag is cleared *before* the function runs, so what a thread prepared before its `wake` is always seen by a call
    that starts afterwards.
    """

    __slots__ = ("_function", "_lock", "_loop", "_pending")

    def __init__(self, loop: Loop, function: Callable[[], object]) -> None:
        self._loop = loop
        self._function = function
        self._pending = False
        self._lock = threading.Lock()

    def wake(self) -> bool:
        """Ask for a call. From any thread, never waits.

        Returns:
            False when the loop has ended.
        """
        with self._lock:
            if self._pending:
                return True
            self._pending = True
        if self._loop.post(self._run):
            return True
        self._pending = False
        return False

    def _run(self) -> None:
        with self._lock:
            self._pending = False
        self._function()
