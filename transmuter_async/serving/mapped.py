"""`Serving.map`: a source in, results out, and no more in between than was asked for.

A feeder task of the serving takes from the source and hands requests in; the iterator gives results out. What was taken and
not given out yet is bounded by `concurrency`, so a slow reader holds the source back. Leaving the iterator, also without a
word, ends the feeder and cancels what it had sent.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.lowlevel import checkpoint

from transmuter_async.bridge import Loop
from transmuter_async.errors import ActorStopped, MisuseError
from transmuter_async.serving.actor import ServingActor, Ticket

__all__ = ["Mapped"]

Source = AsyncIterable[Mapping[str, Any]] | Iterable[Mapping[str, Any]]


class _State:
    """What the iterator and its feeder share; it does not know the iterator."""

    def __init__(
        self,
        actor: ServingActor,
        source: Source,
        limit: int,
        ordered: bool,
        timeout: float | None,
        copy: bool | None,
    ) -> None:
        self.actor = actor
        self.copy = copy
        self.source = source
        self.limit = limit
        self.ordered = ordered
        self.timeout = timeout
        self.scope = anyio.CancelScope()
        self.changed = anyio.Event()
        self.room = anyio.Event()
        self.sent = 0
        self.given = 0
        self.exhausted = False
        self.error: BaseException | None = None
        self.done: dict[int, tuple[Any, BaseException | None]] = {}
        self.order: deque[int] = deque()
        self.tickets: dict[int, Ticket] = {}

    def settle(self, index: int, value: Any, error: BaseException | None) -> None:
        self.tickets.pop(index, None)
        self.done[index] = (value, error)
        if not self.ordered:
            self.order.append(index)
        self.changed.set()

    def take(self) -> tuple[Any, BaseException | None] | None:
        """The next result, None while there is none."""
        index = self.given if self.ordered else self.order[0] if self.order else -1
        found = self.done.pop(index, None)
        if found is not None:
            if not self.ordered:
                self.order.popleft()
            self.given += 1
            self.room.set()
        return found

    def close(self) -> None:
        """End the feeder, and leave what is under way."""
        self.scope.cancel()
        self.exhausted = True
        for ticket in list(self.tickets.values()):
            self.actor.abandon(ticket, "cancelled")
        self.tickets.clear()
        self.changed.set()

    # The feeder's task.

    async def feed(self) -> None:
        try:
            with self.scope:
                if isinstance(self.source, AsyncIterable):
                    await self._feed_async(self.source)
                else:
                    await self._feed_plain(self.source)
        except Exception as error:
            self.error = error  # of the source
        finally:
            if self.actor.state != "running" and self.error is None and not self.scope.cancel_called:
                self.error = self.actor.stopped_error()
            self.exhausted = True
            self.changed.set()

    async def _feed_plain(self, source: Iterable[Mapping[str, Any]]) -> None:
        iterator = iter(source)
        while True:
            await self._wait_room()
            try:
                inputs = next(iterator)
            except StopIteration:
                return
            if not await self._send(inputs):
                return

    async def _feed_async(self, source: AsyncIterable[Mapping[str, Any]]) -> None:
        iterator = aiter(source)
        try:
            while True:
                await self._wait_room()
                try:
                    inputs = await anext(iterator)
                except StopAsyncIteration:
                    return
                if not await self._send(inputs):
                    return
        finally:
            aclose = getattr(iterator, "aclose", None)
            if aclose is not None:
                with anyio.CancelScope(shield=True):
                    await aclose()

    async def _wait_room(self) -> None:
        while self.sent - self.given >= self.limit:
            self.room = anyio.Event()
            await self.room.wait()

    async def _send(self, inputs: Mapping[str, Any]) -> bool:
        """Hand one item in. False: the serving has ended, which is told where the result would have been."""
        await checkpoint()  # a source that always has something must not hold the loop
        actor, index = self.actor, self.sent
        reply = _MapReply(self, index)
        self.sent += 1
        try:
            item = await actor.admit(actor.compiled._prepared.take_inputs(inputs, self.copy))
            while True:
                if self.scope.cancel_called:  # the map was left, and asyncio tells this task at its next wait only
                    return False
                seconds = actor.shut_for()
                if not seconds:
                    break
                await anyio.sleep(seconds)
            ticket = actor.submit(item, reply, caller=self, timeout=self.timeout, bulk=True)
        except Exception as error:
            self.settle(index, None, error)
            return not isinstance(error, ActorStopped)
        self.tickets[index] = ticket
        await actor.wait_room(ticket)  # one item stands in the line, not all of them before everybody else
        return True


class _MapReply:
    """A slot for one result of a map."""

    __slots__ = ("_index", "_state", "done")

    def __init__(self, state: _State, index: int) -> None:
        self._state = state
        self._index = index
        self.done = False

    def settle(self, value: Any, error: BaseException | None) -> None:
        if not self.done:
            self.done = True
            self._state.settle(self._index, value, error)


class Mapped(AsyncIterator[Any]):
    """The results of `Serving.map`. Also an async context manager, which ends it.

    An item that fails raises its error where its result would have come; the iterator can be asked on after it. With
    `return_exceptions` the error is the result.
    """

    def __init__(
        self,
        actor: ServingActor,
        source: Source,
        *,
        concurrency: int,
        ordered: bool,
        timeout: float | None,
        copy: bool | None,
        return_exceptions: bool,
    ) -> None:
        actor.check_place()  # here already: what is made below belongs to the loop that makes it
        if concurrency < 1:
            raise ValueError(f"concurrency={concurrency} must be at least 1")
        given: Any = source
        if not isinstance(given, (AsyncIterable, Iterable)) or isinstance(given, (Mapping, str, bytes)):
            raise TypeError(
                f"map takes an iterable or async iterable of inputs, not a {type(source).__name__}; give run() one request"
            )
        self._state = _State(actor, source, concurrency, ordered, timeout, copy)
        self._return_exceptions = return_exceptions
        self._started = False
        self._waiting = False
        self._finalizer = weakref.finalize(self, _forget, actor.loop, self._state)
        self._finalizer.atexit = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        state = self._state
        if not self._started:
            state.actor.check_place()
            if state.actor.state != "running":
                await checkpoint()
                raise state.actor.stopped_error()
            self._started = True
            state.actor.start_soon(state.feed)
        if self._waiting:
            raise MisuseError("two tasks iterate over one map at the same time; give each a map of its own")
        self._waiting = True
        try:
            await checkpoint()
            while (found := state.take()) is None:
                if state.exhausted and state.given == state.sent:
                    error, state.error = state.error, None
                    if error is not None:
                        raise error
                    raise StopAsyncIteration
                if state.scope.cancel_called:
                    raise StopAsyncIteration
                state.changed = anyio.Event()
                await state.changed.wait()
        finally:
            self._waiting = False
        value, problem = found
        if problem is not None and not self._return_exceptions:
            raise problem
        return value if problem is None else problem

    async def aclose(self) -> None:
        """End it: nothing more is taken from the source, and what is under way is cancelled."""
        self._finalizer.detach()
        self._state.close()
        await checkpoint()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finalizer.detach()
        self._state.close()


def _forget(loop: Loop, state: _State) -> None:
    """The iterator was dropped, in whichever thread."""
    if not state.exhausted or state.tickets:
        loop.post(state.close)
