"""The event bus: what happens inside, told to whoever subscribed, at no cost to who did not.

An `Event` has a name, measurements (numbers) and metadata (facts, never payload). A *span* is `NAME.start` and then
`NAME.stop` or `NAME.exception`, tied together by the metadata `span`. docs/telemetry.md lists every event;
`CATALOGUE` below is the same list for programs.

Invariants:

- `emit` is safe in any thread, never waits for a listener and never raises because of one. A full subscription drops
  the event and counts it; so does one whose loop has ended. Emitted = received + dropped + still buffered.
- Call sites of `emit` stand behind `if bus.wants(name)`, so that nothing is built for nobody.
- An exception inside an event keeps no array alive: it is a copy without traceback, cause or foreign objects.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import ObjectReceiveStream
from anyio.lowlevel import checkpoint

from transmuter_async.bridge import Waker, current_loop, is_cancellation
from transmuter_async.errors import MisuseError

__all__ = [
    "CATALOGUE",
    "Event",
    "EventKind",
    "Span",
    "Subscription",
    "SubscriptionStatistics",
    "Telemetry",
    "TelemetryStatistics",
    "detached",
]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    Attributes:
        name: Dotted, `"transmuter.cache.hit"`.
        measurements: Numbers by name. Times and durations are integers in nanoseconds, sizes in bytes.
        metadata: Facts by name. Never texts, tensors or tokens of the user.
    """

    name: str
    measurements: Mapping[str, int | float]
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EventKind:
    """What every event of one name carries at least: names of `measurements` and `metadata`."""

    measurements: tuple[str, ...]
    metadata: tuple[str, ...]


def _catalogue() -> dict[str, EventKind]:
    """TELEMETRY as a table: spans (metadata of start, additions of stop, measurements of stop), then single events."""
    spans: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
        "load": (("source",), ("node_count", "opset"), ()),
        "compile": (("source", "compiler", "platform"), ("graph_break",), ()),
        "call": (("source", "actor"), ("tier",), ("queued", "compiling")),
        "run": (("source",), (), ()),
        "segment.compile": (
            ("source", "position", "shapes", "actor"),
            ("stop", "compiled", "disk_cache", "reason", "host_values"),
            (),
        ),
        "break": (("source", "position", "node", "op_type", "actor"), (), ()),
        "hub.download": (("source", "revision"), (), ("bytes",)),
        "hub.info": (("source", "revision"), ("result",), ()),
        "batch": (("serving", "bucket"), (), ("size", "padding", "queue_depth", "oldest_wait")),
    }
    singles: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
        "cache.hit": (("count",), ("source", "position", "shapes", "actor")),
        "cache.miss": (("count",), ("source", "position", "shapes", "actor")),
        "cache.evict": (("count",), ("source", "position", "shapes", "cache_size", "actor")),
        "cache.advice": (("count",), ("source", "position", "axis", "advice", "actor")),
        "disk_cache.error": (("count",), ("reason",)),
        "disk_cache.evict": (("bytes",), ("reason",)),
        "hub.hit": (("count", "bytes"), ("source", "revision", "check")),
        "hub.download.progress": (("bytes", "total"), ("source", "revision")),
        "queue.rejected": (("count",), ("serving", "why")),
        "breaker.opened": (("count", "retry_after"), ("serving", "reason")),
        "breaker.closed": (("count",), ("serving", "reason")),
        "actor.started": (("count",), ("actor", "source", "reason")),
        "actor.stopped": (("count",), ("actor", "source", "reason")),
        "actor.restarted": (("count",), ("actor", "source", "reason")),
        "memory.stats": ((), ("device",)),
        "memory.release": (("bytes",), ("actor", "what")),
        "memory.restore": (("bytes",), ("actor", "what")),
    }
    table = {f"transmuter.{name}": EventKind(*kind) for name, kind in singles.items()}
    for name, (start, added, measured) in spans.items():
        start = ("span", *start)
        table[f"transmuter.{name}.start"] = EventKind(("system_time", "monotonic_time"), start)
        table[f"transmuter.{name}.stop"] = EventKind(("duration", "monotonic_time", *measured), (*start, *added))
        table[f"transmuter.{name}.exception"] = EventKind(
            ("duration", "monotonic_time"), (*start, "kind", "reason", "stacktrace")
        )
    return table


CATALOGUE: Mapping[str, EventKind] = _catalogue()
"""Every event of the library by name, with the keys that it always carries."""

_PLAIN = (str, int, float, bool, type(None))


def _plain(value: Any) -> Any:
    """`value` if it holds nothing but plain scalars, else a word for it: arrays must not live on in an event."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list, frozenset, set)):
        return tuple(_plain(item) for item in value)
    if isinstance(value, BaseException):
        return detached(value)
    return f"<{type(value).__name__}>"


def detached(error: BaseException) -> BaseException:
    """A copy of `error`, of the same class and text, that holds no traceback, no cause and no foreign object.

    Frames of a traceback hold the arrays of the call that failed; an event may be kept for long.
    """
    kind = type(error)
    arguments = tuple(_plain(argument) for argument in error.args)
    text = _text(error)
    try:
        if isinstance(error, BaseExceptionGroup):
            copy: BaseException = error.derive([detached(inner) for inner in error.exceptions])
        else:
            copy = kind.__new__(kind, *arguments)
            copy.args = arguments
            if isinstance(error, OSError) and isinstance(copy, OSError):  # these live outside of `args` and `__dict__`
                copy.errno, copy.strerror, copy.filename = error.errno, error.strerror, _plain(error.filename)
            copy.__dict__.update({name: _plain(value) for name, value in vars(error).items() if name != "__notes__"})
    except Exception:  # an exception class with ideas of its own
        copy = RuntimeError(text)
    # The words matter more than the class, where a class loses them.
    return copy if _text(copy) == text and isinstance(copy, kind) else RuntimeError(f"{kind.__name__}: {text}")


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a broken __str__ must not take the event with it
        return f"<{type(error).__name__}>"


@dataclass(frozen=True, slots=True)
class SubscriptionStatistics:
    """Counts of one subscription: `received` + `dropped` + `buffered` events matched it."""

    received: int
    dropped: int
    buffered: int
    buffer: int


class Subscription(ObjectReceiveStream[Event]):
    """The events under some prefixes, from entering `async with` until leaving it (or the bus closes).

    An async iterable and an anyio receive stream. Its buffer is bounded: an event that finds it full is dropped and
    counted, and the next one delivered says in its metadata `dropped` how many were lost before it. Belongs to the
    loop in which it was entered.
    """

    def __init__(self, bus: Telemetry, prefixes: tuple[str, ...], buffer: int) -> None:
        self._bus = bus
        self._prefixes = prefixes
        self._buffer = buffer
        self._events: deque[Event] = deque()
        self._lock = threading.Lock()
        self._lost = 0  # since the last event that found room
        self._dropped = 0
        self._received = 0
        self._closed = True
        self._waiting: set[anyio.Event] = set()
        self._waker: Waker | None = None

    @property
    def dropped(self) -> int:
        """Events that matched and were not delivered."""
        return self._dropped

    def statistics(self) -> SubscriptionStatistics:
        """Counts so far."""
        with self._lock:
            return SubscriptionStatistics(self._received, self._dropped, len(self._events), self._buffer)

    def matches(self, name: str) -> bool:
        """Whether an event of this name comes here: prefixes match at dots, the empty one matches all."""
        return any(not prefix or name == prefix or name.startswith(prefix + ".") for prefix in self._prefixes)

    async def __aenter__(self) -> Self:
        return self.open()

    def open(self) -> Self:
        """What entering `async with` does, for code that can't await but runs in the loop of the reader."""
        if self._waker is not None:
            raise MisuseError("a subscription can be entered once; ask the bus for another one")
        self._waker = Waker(current_loop(), self._wake)
        self._closed = False
        self._bus._add(self)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        exc_traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def full(self) -> bool:
        """Whether the next event may find no room; `lose` then says whether that is so."""
        return len(self._events) >= self._buffer

    def lose(self) -> bool:
        """Count an event that finds no room, before it is made. False: there is room again."""
        with self._lock:
            if len(self._events) < self._buffer:
                return False
            if not self._closed:
                self._lost += 1
                self._dropped += 1
            return True

    def offer(self, event: Event) -> None:
        """Buffer `event`, or drop and count it. From any thread, never waits for the subscriber."""
        waker = self._waker
        assert waker is not None
        with self._lock:
            if self._closed:
                return
            if len(self._events) >= self._buffer:
                self._lost += 1
                self._dropped += 1
                return
            if self._lost:
                event = Event(event.name, event.measurements, {**event.metadata, "dropped": self._lost})
                self._lost = 0
            self._events.append(event)
        if not waker.wake():
            self.close()  # the subscriber's loop has ended: nobody will ever read this

    def receive_nowait(self) -> Event:
        """The next event.

        Raises:
            anyio.WouldBlock: None is there.
            anyio.EndOfStream: None is there, and none will come.
        """
        with self._lock:
            if self._events:
                self._received += 1
                return self._events.popleft()
            if self._closed:
                if self._waker is None:
                    raise MisuseError(
                        "the subscription was not entered: write `async with telemetry.subscribe(…) as events`"
                    )
                raise anyio.EndOfStream
        raise anyio.WouldBlock

    async def receive(self) -> Event:
        """The next event; waits for it. Cancelled in the middle it takes none.

        Raises:
            anyio.EndOfStream: The bus has closed and everything buffered was received.
        """
        await checkpoint()
        while True:
            signal = anyio.Event()
            self._waiting.add(signal)  # before looking: a wake in between is then not missed
            try:
                return self.receive_nowait()
            except anyio.WouldBlock:
                await signal.wait()
            finally:
                self._waiting.discard(signal)

    async def aclose(self) -> None:
        """End the subscription. What is buffered counts as dropped."""
        self.close()
        await checkpoint()

    def close(self) -> None:
        """`aclose` for code that can't await. From any thread."""
        self.finish(keep=False)

    def finish(self, *, keep: bool = True) -> None:
        """No further events; those buffered can still be received, or with `keep=False` are dropped. From any thread."""
        with self._lock:
            if not keep:
                self._dropped += len(self._events)
                self._events.clear()
            if self._closed:
                return
            self._closed = True
        self._bus._remove(self)
        if self._waker is not None:
            self._waker.wake()

    def _wake(self) -> None:
        for signal in self._waiting:
            signal.set()


class _Routes(dict[str, tuple[Subscription, ...]]):
    """Name of an event → who wants it, computed on first use. Replaced as a whole when the subscriptions change."""

    __slots__ = ("subscriptions",)

    def __init__(self, subscriptions: tuple[Subscription, ...] = ()) -> None:
        super().__init__()
        self.subscriptions = subscriptions

    def __missing__(self, name: str) -> tuple[Subscription, ...]:
        names = [name[:-1] + part for part in ("start", "stop", "exception")] if name.endswith(".*") else [name]
        found = tuple(each for each in self.subscriptions if any(map(each.matches, names)))
        if sys.getsizeof(self) < 1 << 16:  # names made up by a caller must not fill the memory
            self[name] = found
        return found


_current: contextvars.ContextVar[Span | None] = contextvars.ContextVar("transmuter_async_span", default=None)
_ids = itertools.count(1)  # of the process: two buses may feed one exporter


@functools.lru_cache(256)
def _span_names(name: str) -> tuple[str, str, str]:
    return f"{name}.start", f"{name}.stop", f"{name}.exception"


class Span:
    """A start and its stop or exception. A context manager; `Telemetry.span` makes it.

    Attributes:
        id: What ties the events together: their metadata `span`.
        metadata: Additions to the metadata of the stop; fill it inside the block.
        measurements: Additions to the measurements of the stop.
        started: `time.monotonic_ns()` of its start; 0 before.
    """

    __slots__ = ("_bus", "_call", "_facts", "_names", "_parent", "_token", "id", "measurements", "metadata", "started")

    def __init__(
        self, bus: Telemetry, name: str, facts: Mapping[str, Any], parent: int | None, call: int | None
    ) -> None:
        self._bus = bus
        self._names = _span_names(name)
        self._facts = facts
        self._parent = parent
        self._call = call
        self.started = 0
        self._token: contextvars.Token[Span | None] | None = None
        self.id = next(_ids)
        self.metadata: dict[str, Any] = {}
        self.measurements: dict[str, int | float] = {}

    def start(self) -> Self:
        """Emit `NAME.start`. For spans that begin and end in different functions; else use `with`."""
        self.started = time.monotonic_ns()
        name = self._names[0]
        if self._bus.wants(name):
            measurements = {"system_time": time.time_ns(), "monotonic_time": self.started}
            self._bus.emit(name, measurements, self._tied({}))
        return self

    def stop(self) -> None:
        """Emit `NAME.stop` with what `metadata` and `measurements` hold by now."""
        name = self._names[1]
        if self._bus.wants(name):
            now = time.monotonic_ns()
            measurements = {"duration": now - self.started, "monotonic_time": now, **self.measurements}
            self._bus.emit(name, measurements, self._tied(self.metadata))

    def fail(self, error: BaseException, *, cancelled: bool | None = None) -> None:
        """Emit `NAME.exception` for `error`; `cancelled`: whether that is a cancellation, told by its class by default."""
        name = self._names[2]
        if self._bus.wants(name):
            now = time.monotonic_ns()
            self._bus.emit(
                name,
                {"duration": now - self.started, "monotonic_time": now},
                self._tied(
                    {
                        "kind": "cancelled"
                        if (is_cancellation(error) if cancelled is None else cancelled)
                        else "error",
                        "reason": detached(error),
                        "stacktrace": "".join(traceback.format_exception(error)),
                    }
                ),
            )

    def __enter__(self) -> Self:
        self._token = _current.set(self)
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            try:
                _current.reset(self._token)
            except ValueError:  # left in another context than entered (a generator finalised elsewhere)
                pass
            self._token = None
        if error is None:
            self.stop()
        else:
            self.fail(error)

    def _tied(self, more: Mapping[str, Any]) -> dict[str, Any]:
        tied = {**self._facts, **more, "span": self.id}
        if self._parent is not None:
            tied["parent"] = self._parent
        if self._call is not None:
            tied["call"] = self._call
        return tied


@dataclass(frozen=True, slots=True)
class TelemetryStatistics:
    """Counts of a bus: open subscriptions, and what they received and dropped, ended ones up to their end included."""

    subscriptions: int
    received: int
    dropped: int


class Telemetry:
    """The bus of one runtime. Emitting works from any thread, subscribing from any loop."""

    def __init__(self) -> None:
        self._routes = _Routes()
        self._lock = threading.Lock()
        self._past_received = 0
        self._past_dropped = 0
        self._closed = False

    def wants(self, name: str) -> bool:
        """Whether somebody listens to `name`. The guard in front of every `emit`."""
        return bool(self._routes[name])

    def traces(self, span: str) -> bool:
        """Whether somebody listens to any event of a span, `"transmuter.break.*"`: the guard in front of its facts."""
        return bool(self._routes[span])

    def emit(self, name: str, measurements: Mapping[str, int | float], metadata: Mapping[str, Any]) -> None:
        """Give an event to everybody who subscribed to it. Any thread; never waits, never raises for a listener."""
        event: Event | None = None
        for subscription in self._routes[name]:
            if subscription.full and subscription.lose():
                continue  # who does not read costs next to nothing
            if event is None:
                event = Event(name, measurements, metadata)
            subscription.offer(event)

    def span(
        self, name: str, metadata: Mapping[str, Any], *, parent: int | None = None, call: int | None = None
    ) -> Span:
        """A context manager that emits `NAME.start`, then `NAME.stop`, or `NAME.exception` and raises on.

        Args:
            name: Without the last part: `"transmuter.load"`.
            metadata: Facts of all its events.
            parent: The span around this one; by default the one entered in the same context, if any.
            call: The span of the call that this is part of, if any.
        """
        if parent is None:
            outer = _current.get()
            if outer is not None and outer._bus is self:
                parent = outer.id
        return Span(self, name, metadata, parent, call)

    def subscribe(self, *prefixes: str, buffer: int = 1024) -> Subscription:
        """Events under `prefixes` (none: all), as `async with … as events: async for event in events`.

        Args:
            prefixes: Dotted names; each stands for itself and everything under it. Overlapping ones give each event once.
            buffer: Events that may wait to be read; further ones are dropped and counted.

        Raises:
            ValueError: `buffer` is less than 1.
        """
        if buffer < 1:
            raise ValueError(f"buffer is {buffer}, but a subscription needs room for at least one event")
        return Subscription(self, prefixes or ("",), buffer)

    def statistics(self) -> TelemetryStatistics:
        """Counts over all subscriptions so far."""
        with self._lock:
            live = [each.statistics() for each in self._routes.subscriptions]
            return TelemetryStatistics(
                len(live),
                self._past_received + sum(each.received for each in live),
                self._past_dropped + sum(each.dropped for each in live),
            )

    def close(self) -> None:
        """End every subscription, so that `async for` ends once it has read what is buffered. From any thread."""
        with self._lock:
            self._closed = True
            subscriptions = self._routes.subscriptions
        for subscription in subscriptions:
            subscription.finish()

    def _add(self, subscription: Subscription) -> None:
        with self._lock:
            if not self._closed:
                self._routes = _Routes((*self._routes.subscriptions, subscription))
                return
        subscription.finish()

    def _remove(self, subscription: Subscription) -> None:
        with self._lock:
            rest = tuple(each for each in self._routes.subscriptions if each is not subscription)
            if len(rest) < len(self._routes.subscriptions):
                self._routes = _Routes(rest)
                counts = subscription.statistics()
                self._past_received += counts.received
                self._past_dropped += counts.dropped
