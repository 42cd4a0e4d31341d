"""Where the client's coroutines run: aiohttp knows asyncio only, the caller may be on trio.

On asyncio they run in the caller's own task (`Direct`). On trio they run in one asyncio loop in a thread of ours (`Background`), started
with the first call and ended with the client. A call carries the caller's context variables over; a cancellation is passed on, and then
the call is waited for, so that when it has ended here, it has ended there.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import anyio
from anyio.abc import TaskGroup

from transmuter_async.bridge import Loop, current_loop
from transmuter_async.errors import MisuseError
from transmuter_async.hub.errors import HubConnectionError

__all__ = ["Background", "Direct", "Home", "home"]

T = TypeVar("T")


class Home(Protocol):
    """Where coroutines run that need asyncio."""

    async def run(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Runs `function(*args)` there and returns what it returns."""

    async def aclose(self) -> None:
        """Ends what was started for it."""


def home() -> Home:
    """The place for a client that is used from the running loop."""
    return Direct() if current_loop().backend == "asyncio" else Background()


class Direct:
    """In the caller's loop and task."""

    def __init__(self) -> None:
        self._loop = current_loop()

    async def run(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Runs `function(*args)`.

        Raises:
            MisuseError: Another loop runs than the one that the client was entered in.
        """
        if not self._loop.is_current():
            raise MisuseError("This HubClient was entered in another event loop; enter one in each loop.")
        return await function(*args)

    async def aclose(self) -> None:
        """There is nothing to end."""


class _Call:
    """One call that runs in the background loop."""

    def __init__(self, caller: Loop) -> None:
        self._caller = caller
        self.ended = anyio.Event()
        self.scope: anyio.CancelScope | None = None
        self.cancelled = False
        self.error: BaseException | None = None
        self.value: object = None

    async def work(self, function: Callable[..., Awaitable[object]], args: tuple[object, ...]) -> None:
        """Runs in the background loop."""
        try:
            with anyio.CancelScope() as self.scope:
                if self.cancelled:
                    self.scope.cancel()
                self.value = await function(*args)
        except BaseException as error:  # handed to the caller, who raises it
            self.error = error
        finally:
            self._caller.post(self.ended.set)

    def cancel(self) -> None:
        """Runs in the background loop."""
        self.cancelled = True
        if self.scope is not None:
            self.scope.cancel()


class Background:
    """In an asyncio loop in a thread of ours."""

    def __init__(self) -> None:
        self._owner = current_loop()
        self._thread: threading.Thread | None = None
        self._ready = anyio.Event()
        self._ended = anyio.Event()
        self._loop: Loop | None = None
        self._tasks: TaskGroup | None = None
        self._stop: anyio.Event | None = None
        self._failure: BaseException | None = None

    async def run(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Runs `function(*args)` there, with the caller's context variables, and waits for its end in any case.

        Raises:
            MisuseError: Another loop runs than the one that the client was entered in.
        """
        if not self._owner.is_current():
            raise MisuseError("This HubClient was entered in another event loop; enter one in each loop.")
        await self._start()
        if self._loop is None:
            raise HubConnectionError(
                f"The asyncio loop that connections need can't be started ({self._failure!r}). Free what it lacks, or use asyncio.",
                retryable=False,
            ) from self._failure
        call = _Call(self._owner)
        self._loop.post(contextvars.copy_context().run, self._spawn, call, function, args)
        try:
            await call.ended.wait()
        except BaseException:
            self._loop.post(call.cancel)
            with anyio.CancelScope(shield=True):
                await call.ended.wait()
            raise
        if call.error is not None:
            try:
                raise call.error
            finally:
                del call  # the traceback holds this frame, and the frame the error
        return call.value  # type: ignore[return-value]  # what `function` returned

    async def aclose(self) -> None:
        """Ends the loop and its thread."""
        if self._thread is None:
            return
        with anyio.CancelScope(shield=True):
            await self._ready.wait()
            if self._loop is not None and self._stop is not None:
                self._loop.post(self._stop.set)
            await self._ended.wait()
        self._thread.join()  # it has posted its last word: what is left is microseconds
        self._thread = None

    async def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._live, name="transmuter-hub-loop")
            self._thread.start()
        await self._ready.wait()

    def _live(self) -> None:
        try:
            anyio.run(self._main, backend="asyncio")
        except Exception as error:  # told to whoever calls: without files left to open there is no loop
            self._failure = error
        finally:
            self._owner.post(self._ready.set)
            self._owner.post(self._ended.set)

    async def _main(self) -> None:
        self._loop = current_loop()
        self._stop = anyio.Event()
        async with anyio.create_task_group() as self._tasks:
            self._owner.post(self._ready.set)
            await self._stop.wait()

    def _spawn(self, call: _Call, function: Callable[..., Awaitable[object]], args: tuple[object, ...]) -> None:
        _name_asyncio()
        assert self._tasks is not None
        self._tasks.start_soon(call.work, function, args)


def _name_asyncio() -> None:
    """The caller's context says "trio" where sniffio is installed; in this copy of it that is wrong."""
    try:
        from sniffio import current_async_library_cvar
    except ImportError:
        return
    current_async_library_cvar.set("asyncio")
