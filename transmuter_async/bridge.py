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
from typing import Any

from anyio.lowlevel import EventLoopToken, current_token

from transmuter_async.errors import MisuseError

__all__ = ["Loop", "Waker", "current_loop", "current_loop_or_none", "is_cancellation"]


class Loop:
    """An address of a running event loop: callable from any thread, comparable, never waited for.

    Attributes:
        backend: `"asyncio"` or `"trio"`.
    """

    __slots__ = ("_native", "_post", "_running", "backend")

    def __init__(self, native: Any) -> None:
        self._native = native
        if isinstance(native, asyncio.AbstractEventLoop):
            self.backend = "asyncio"
            self._post: Callable[..., object] = native.call_soon_threadsafe
            self._running: Callable[[], Any] = asyncio._get_running_loop
        else:
            self.backend = "trio"
            self._running = _native_or_none
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
