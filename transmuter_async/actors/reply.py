"""Reply slots: where an asker waits for its answer.

`anyio` has futures of its own in newer versions, but they rethrow errors as another class; these give the asker the
true error. A slot is filled once, on the loop; filling it again does nothing, so that "answer everyone" is always safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, cast

from transmuter_async.bridge import Loop

__all__ = ["AnyReply", "Reply", "ThreadReply", "again"]

T = TypeVar("T")


class AnyReply(Protocol):
    """What an actor sees of a slot."""

    done: bool

    def settle(self, value: Any, error: BaseException | None) -> None:
        """Fill the slot, if nothing has yet."""
        ...


class Reply(Generic[T]):
    """A slot for one task of the loop."""

    __slots__ = ("_error", "_event", "_value", "done", "wait_filled")

    def __init__(self, loop: Loop) -> None:
        self._event = loop.signal()
        self.wait_filled = self._event.wait  # until there is something to `take`; one frame less than a method
        self._value: Any = None
        self._error: BaseException | None = None
        self.done = False

    def settle(self, value: Any, error: BaseException | None) -> None:
        """Fill the slot with a value, or an error; the first one counts."""
        if not self.done:
            self.done = True
            self._value = value
            self._error = error
            self._event.set()

    async def wait(self) -> T:
        """The value, or raises the error."""
        await self._event.wait()
        return self.take()

    def take(self) -> T:
        """The value of a filled slot, or raises the error. Takes it out: a slot keeps no array alive."""
        value, error = self._value, self._error
        self._value = self._error = None
        if error is not None:
            try:
                raise error
            finally:
                del error  # the traceback holds this frame: without this, a cycle with arrays in it
        return cast(T, value)


class ThreadReply(Generic[T]):
    """A slot for a thread that may block."""

    __slots__ = ("_error", "_lock", "_value", "done")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._value: Any = None
        self._error: BaseException | None = None
        self.done = False

    def settle(self, value: Any, error: BaseException | None) -> None:
        """Fill the slot with a value, or an error; the first one counts."""
        if not self.done:
            self.done = True
            self._value = value
            self._error = error
            self._lock.release()

    def wait(self, timeout: float | None) -> bool:
        """Block until the slot is filled, or for `timeout` seconds. Whether it is filled."""
        return self._lock.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX))

    def wait_while(self, alive: Callable[[], bool], timeout: float | None) -> bool:
        """`wait`, but not for what has ended: asks `alive` each second, and returns when it is not. Whether it is filled."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = 1.0 if until is None else min(1.0, until - time.monotonic())
            if self.wait(left):
                return True
            if left < 1.0 or not alive():
                return self.done

    def take(self) -> T:
        """The value, or raises the error."""
        value, error = self._value, self._error
        self._value = self._error = None
        if error is not None:
            try:
                raise error
            finally:
                del error
        return cast(T, value)


def again(error: BaseException) -> BaseException:
    """An error like `error` for one more asker: raised in two tasks, one object would collect both tracebacks.

    Same class, text, facts and cause, no traceback; `error` itself where its class can't be made anew.
    """
    kind = type(error)
    try:
        copy = kind.__new__(kind, *error.args)
        copy.args = error.args
        copy.__dict__.update(vars(error))
        same = str(copy) == str(error)
    except Exception:  # a class with ideas of its own
        return error
    if not same:
        return error
    copy.__cause__ = error.__cause__
    copy.__suppress_context__ = True
    return copy
