"""The bus: who gets what, in which order, what is counted, and what an event may hold."""

from __future__ import annotations

import ast
import gc
import threading
import weakref
from pathlib import Path

import anyio
import numpy as np
import pytest

import transmuter_async
from transmuter_async.errors import IndexOutOfRange, MisuseError
from transmuter_async.telemetry import CATALOGUE, Event, Telemetry, detached
from transmuter_async.testing import Recorder

PACKAGE = Path(transmuter_async.__file__).parent


async def test_prefixes_match_at_dots_and_each_event_comes_once() -> None:
    bus = Telemetry()
    async with bus.subscribe("transmuter.cache", "transmuter.cache.hit") as events:
        assert bus.wants("transmuter.cache.hit")
        assert bus.wants("transmuter.cache")
        assert not bus.wants("transmuter.cached")
        assert not bus.wants("transmuter")
        bus.emit("transmuter.cached", {}, {})
        bus.emit("transmuter.cache.hit", {"count": 1}, {"position": 0})
        bus.emit("transmuter.cache.miss", {"count": 1}, {})
        assert await events.receive() == Event("transmuter.cache.hit", {"count": 1}, {"position": 0})
        assert (await events.receive()).name == "transmuter.cache.miss"
        with pytest.raises(anyio.WouldBlock):
            events.receive_nowait()
    assert not bus.wants("transmuter.cache.hit")


async def test_iteration_ends_when_the_bus_closes() -> None:
    bus = Telemetry()
    async with bus.subscribe() as events:
        bus.emit("a", {}, {})
        bus.close()
        assert [event.name async for event in events] == ["a"]
    async with bus.subscribe() as late:
        assert [event async for event in late] == []


async def test_a_waiting_subscriber_is_woken_from_a_thread() -> None:
    bus = Telemetry()
    async with bus.subscribe("n") as events:
        got: list[int] = []

        async def read() -> None:
            async for event in events:
                got.append(event.measurements["i"])

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await anyio.wait_all_tasks_blocked()

            def work() -> None:
                for number in range(500):
                    bus.emit("n", {"i": number}, {})
                bus.close()

            thread = threading.Thread(target=work)
            thread.start()
        thread.join()
        assert got == list(range(500))


async def test_a_full_subscription_drops_counts_and_says_so() -> None:
    bus = Telemetry()
    async with bus.subscribe("n", buffer=2) as events:
        for number in range(5):
            bus.emit("n", {"i": number}, {"k": 1})
        assert events.dropped == 3
        assert [(await events.receive()).measurements["i"] for _ in range(2)] == [0, 1]
        bus.emit("n", {"i": 5}, {"k": 1})
        assert await events.receive() == Event("n", {"i": 5}, {"k": 1, "dropped": 3})
        bus.emit("n", {"i": 6}, {"k": 1})
        assert (await events.receive()).metadata == {"k": 1}
        bus.emit("n", {"i": 7}, {})
    counts = events.statistics()
    assert (counts.received, counts.dropped, counts.buffered) == (4, 4, 0)
    assert bus.statistics().dropped == 4
    assert bus.statistics().subscriptions == 0


async def test_counts_add_up_under_threads_and_cancelled_receives() -> None:
    bus, emitters, each = Telemetry(), 4, 400
    async with bus.subscribe("n", buffer=16) as events:
        got = 0
        running = emitters
        loop_done = anyio.Event()

        def work() -> None:
            nonlocal running
            for number in range(each):
                bus.emit("n", {"i": number}, {})

        threads = [threading.Thread(target=work) for _ in range(emitters)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) or events.statistics().buffered:
            with anyio.move_on_after(0.0001):
                await events.receive()
                got += 1
        loop_done.set()
    assert got == events.statistics().received
    assert got + events.dropped == emitters * each


async def test_a_cancelled_receive_takes_no_event() -> None:
    bus = Telemetry()
    async with bus.subscribe("n") as events:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await events.receive()
        bus.emit("n", {"i": 1}, {})
        with anyio.CancelScope() as scope:
            scope.cancel()
            await events.receive()
        assert (await events.receive()).measurements == {"i": 1}


async def test_several_tasks_share_a_subscription() -> None:
    bus = Telemetry()
    got: list[int] = []
    async with bus.subscribe("n") as events, anyio.create_task_group() as group:

        async def read() -> None:
            async for event in events:
                got.append(event.measurements["i"])

        for _ in range(3):
            group.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        for number in range(10):
            bus.emit("n", {"i": number}, {})
        await anyio.wait_all_tasks_blocked()
        bus.close()
    assert sorted(got) == list(range(10))


def test_an_ended_loop_drops_and_counts() -> None:
    bus = Telemetry()

    async def main() -> object:
        events = bus.subscribe("n")
        await events.__aenter__()
        return events

    events = anyio.run(main)
    bus.emit("n", {}, {})
    assert events.dropped == 1  # type: ignore[attr-defined]
    assert not bus.wants("n")


async def test_subscribe_from_another_loop() -> None:
    bus, names = Telemetry(), []
    ready = threading.Event()

    async def listen() -> None:
        async with bus.subscribe("n") as events:
            ready.set()
            async for event in events:
                names.append(event.name)

    thread = threading.Thread(target=lambda: anyio.run(listen))
    thread.start()
    await anyio.to_thread.run_sync(ready.wait)
    bus.emit("n.a", {}, {})
    bus.close()
    await anyio.to_thread.run_sync(thread.join)
    assert names == ["n.a"]


async def test_misuse_is_named() -> None:
    bus = Telemetry()
    events = bus.subscribe("n")
    with pytest.raises(MisuseError, match="not entered"):
        await events.receive()
    async with events:
        pass
    with pytest.raises(MisuseError, match="once"):
        await events.__aenter__()
    with pytest.raises(ValueError, match="buffer is 0"):
        bus.subscribe(buffer=0)


async def test_a_span_starts_and_stops() -> None:
    bus = Telemetry()
    async with Recorder(bus) as recorder:
        with bus.span("transmuter.load", {"source": "m.onnx"}) as outer:
            with bus.span("transmuter.hub.info", {"source": ("hf", "a/b")}, call=7) as inner:
                inner.metadata["result"] = "fetched"
                inner.measurements["bytes"] = 3
            outer.metadata["node_count"] = 5
    start, inner_start, inner_stop, stop = recorder.events
    assert start.name == "transmuter.load.start"
    assert set(start.measurements) == {"system_time", "monotonic_time"}
    assert start.metadata == {"source": "m.onnx", "span": outer.id}
    assert inner_start.metadata == {"source": ("hf", "a/b"), "span": inner.id, "parent": outer.id, "call": 7}
    assert inner_stop.metadata == {**inner_start.metadata, "result": "fetched"}
    assert inner_stop.measurements["bytes"] == 3
    assert stop.metadata == {"source": "m.onnx", "node_count": 5, "span": outer.id}
    assert set(stop.measurements) == {"duration", "monotonic_time"}
    assert stop.measurements["duration"] >= inner_stop.measurements["duration"] >= 0


async def test_a_failed_span_tells_why_and_raises_on() -> None:
    bus = Telemetry()
    async with Recorder(bus) as recorder:
        with pytest.raises(ValueError, match="bad"), bus.span("transmuter.load", {"source": None}):
            raise ValueError("bad")
        with anyio.CancelScope() as scope:
            scope.cancel()
            with bus.span("transmuter.load", {"source": None}):
                await anyio.sleep_forever()
    failed, cancelled = recorder.named("transmuter.load.exception")
    assert failed.metadata["kind"] == "error"
    assert isinstance(failed.metadata["reason"], ValueError)
    assert str(failed.metadata["reason"]) == "bad"
    assert "raise ValueError" in failed.metadata["stacktrace"]
    assert cancelled.metadata["kind"] == "cancelled"


class Array(np.ndarray):
    """An array that can be referred to weakly."""


async def test_the_reason_keeps_no_array_alive() -> None:
    bus = Telemetry()

    def fail() -> weakref.ref[Array]:
        array = np.zeros(4).view(Array)
        try:
            with bus.span("transmuter.call", {}):
                inner = KeyError(array)
                inner.held = array  # type: ignore[attr-defined]
                raise RuntimeError("no", array) from inner
        except RuntimeError:
            pass
        return weakref.ref(array)

    async with Recorder(bus) as recorder:
        reference = fail()
        gc.collect()
        assert reference() is None
        (event,) = recorder.named("transmuter.call.exception")
        reason = event.metadata["reason"]
        assert (reason.__traceback__, reason.__cause__, reason.__context__) == (None, None, None)
        assert isinstance(reason, RuntimeError)


def test_detached_keeps_class_text_and_facts() -> None:
    error = IndexOutOfRange("index 9 of 'i'", node="n", input="i", axis=0, size=4)
    copy = detached(error)
    assert type(copy) is IndexOutOfRange
    assert str(copy) == str(error)
    assert copy.size == 4
    group = detached(ExceptionGroup("both", [ValueError("a"), OSError(2, "gone", "f")]))
    assert isinstance(group, ExceptionGroup)
    assert isinstance(group.exceptions[1], FileNotFoundError)
    assert str(group.exceptions[1]) == "[Errno 2] gone: 'f'"
    try:
        b"\xff".decode()
    except UnicodeDecodeError as unicode:
        assert "can't decode" in str(detached(unicode))


def test_every_span_of_the_catalogue_has_three_events() -> None:
    spans = [name.removesuffix(".exception") for name in CATALOGUE if name.endswith(".exception")]
    assert len(spans) == 9
    for name in spans:
        start, stop = CATALOGUE[f"{name}.start"], CATALOGUE[f"{name}.stop"]
        assert set(start.metadata) <= set(stop.metadata) & set(CATALOGUE[f"{name}.exception"].metadata)
        assert "duration" in stop.measurements


def guarded(tree: ast.AST) -> list[tuple[int, bool]]:
    """Every `….emit(` call of a module: its line, and whether an `if` that asks `wants` stands around it."""
    found: list[tuple[int, bool]] = []

    def visit(node: ast.AST, safe: bool) -> None:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "emit":
            found.append((node.lineno, safe))
        if isinstance(node, ast.If):
            asks = any(isinstance(part, ast.Attribute) and part.attr == "wants" for part in ast.walk(node.test))
            for child in node.body:
                visit(child, safe or asks)
            for child in [node.test, *node.orelse]:
                visit(child, safe)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, safe and not isinstance(node, (ast.FunctionDef, ast.Lambda)))

    visit(tree, safe=False)
    return found


def test_every_emit_stands_behind_a_guard() -> None:
    sites = {path: guarded(ast.parse(path.read_text())) for path in PACKAGE.rglob("*.py")}
    assert sum(map(len, sites.values())) >= 3  # the spans' own, so the test sees something
    naked = [f"{path.relative_to(PACKAGE)}:{line}" for path, calls in sites.items() for line, safe in calls if not safe]
    assert naked == []
    assert guarded(ast.parse("if bus.wants('a'):\n  bus.emit('a', {}, {})\nelse:\n  bus.emit('b', {}, {})")) == [
        (2, True),
        (4, False),
    ]
