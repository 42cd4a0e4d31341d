"""What must hold for long: memory that does not grow, listeners that do not matter, an end at any time."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from onnx import helper

import transmuter_async as tm
from tests.actors.fakes import own_threads
from tests.test_runtime import affine, model_bytes, rows
from transmuter_async.actors.calls import SharedCache
from transmuter_async.compiler.cache import SegmentCache
from transmuter_async.compiler.segment import Layout
from transmuter_async.testing import HeldCompiler, Recorder

ROOT = Path(__file__).resolve().parents[1]


async def test_a_listener_that_never_reads_changes_nothing_and_the_counts_add_up() -> None:
    async with (
        tm.Runtime() as runtime,
        runtime.telemetry.subscribe("transmuter", buffer=8) as slow,
        Recorder(runtime.telemetry) as recorder,
    ):
        compiled = await runtime.compile(affine())
        for count in range(1, 101):
            await compiled.run({"x": rows(1 + count % 3)})
        emitted = recorder.events
        counts = slow.statistics()
        assert (counts.received, counts.buffered) == (0, 8)
        assert counts.dropped == len(emitted) - 8
        assert len(recorder.named("transmuter.call.stop")) == 100
        got = []
        while counts.buffered:
            got.append(await slow.receive())
            counts = slow.statistics()
        assert [event.name for event in got] == [event.name for event in emitted[:8]]  # the oldest, in order
        await compiled.run({"x": rows(1)})
        assert (await slow.receive()).metadata["dropped"] == counts.dropped
        received = 9
        while slow.statistics().buffered:
            await slow.receive()
            received += 1
        assert received + slow.dropped == len(recorder.events)


@pytest.mark.parametrize("prepare", ["speed", "memory"])
async def test_a_quantized_weight_stays_small_where_that_is_asked_for(prepare: str) -> None:
    rng = np.random.default_rng(3)
    q = rng.integers(-128, 128, (256, 512), np.int8)
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "scale"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    scale = np.array(0.02, np.float32)
    data = model_bytes(nodes, {"x": ["n", 256]}, {"y": ["n", 512]}, q=q, scale=scale)
    x = rng.standard_normal((3, 256)).astype(np.float32)
    async with tm.Runtime() as runtime:
        model = await runtime.load(data, prepare=prepare)
        compiled = await runtime.compile(model, {"x": tm.Spec(x.shape, "float32")})
        want = x.astype(np.float64) @ (q.astype(np.float64) * 0.02)
        np.testing.assert_allclose((await compiled.run({"x": x}))["y"], want, rtol=1e-4, atol=1e-3)
        held = (await compiled.statistics()).weight_bytes
        assert held // q.nbytes == {"speed": 4, "memory": 1}[prepare]
    once = await anyio.to_thread.run_sync(lambda: tm.run_sync(model, {"x": x}, compiler="eager"))
    np.testing.assert_allclose(once["y"], want, rtol=1e-4, atol=1e-3)


def wide(size: int, layers: int) -> bytes:
    """A chain of square products: x float32 (size, size)."""
    names = ["x", *(f"h{i}" for i in range(layers - 1)), "y"]
    nodes = [helper.make_node("MatMul", [a, "w"], [b]) for a, b in zip(names, names[1:], strict=False)]
    w = np.eye(size, dtype=np.float32)
    return model_bytes(nodes, {"x": [size, size]}, {"y": [size, size]}, w=w)


@pytest.mark.parametrize("where", ["compile", "compute"])
async def test_closing_in_the_middle_answers_at_once_and_returns_when_xla_has_ended(where: str) -> None:
    x = np.ones((768, 768), np.float32)
    answers: list[BaseException] = []
    closed = anyio.Event()
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(wide(768, 60))
        actor = compiled._actor

        async def one() -> None:
            try:
                await compiled.run({"x": x})
            except tm.ActorStopped as error:
                assert actor.state == "stopping"  # answered while XLA is still busy
                assert own_threads()
                answers.append(error)

        async def close() -> None:
            await compiled.aclose()
            closed.set()

        with HeldCompiler(compiled) as held:
            if where == "compute":
                held.release()
                await compiled.run({"x": x})
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(one)
                if where == "compile":
                    await held.wait_started()
                else:
                    while not actor._running:
                        await anyio.lowlevel.checkpoint()
                group.start_soon(close)
                while len(answers) < 3:
                    await anyio.lowlevel.checkpoint()
                assert not closed.is_set()
                with pytest.raises(tm.ActorStopped):
                    await compiled.run({"x": x})
                held.release()
        assert closed.is_set()
        assert not [name for name in own_threads() if not name.startswith("transmuter-load")]


@pytest.mark.parametrize("kind", [SegmentCache, SharedCache])
def test_a_cache_lets_go_of_its_programs_one_by_one(kind: type[SegmentCache]) -> None:
    order: list[str] = []

    class Dropped(SimpleNamespace):
        def __del__(self) -> None:
            order.append("dropped")

    cache = kind(8)
    for number in range(5):
        layout = Layout((f"x{number}",), ())
        segment: Any = Dropped(
            place=(0,), position=0, host_values=(), layout=layout, key=(number,), needs=None, code_bytes=3
        )
        cache.put(segment, lambda fact: None, keep=number < 2)
    del segment
    assert cache.code_bytes == 15

    def seen(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call" and frame.f_code is SegmentCache.clear.__code__:
            order.append("the interpreter's turn")

    sys.setprofile(seen)
    try:
        cache.clear()
    finally:
        sys.setprofile(None)
    assert order.count("dropped") == 5
    assert cache.code_bytes == 0
    assert ("dropped", "dropped") not in list(itertools.pairwise(order))  # other threads may run in between


@pytest.mark.parametrize("kind", [SegmentCache, SharedCache])
def test_the_bytes_of_programs_are_those_of_what_is_held(kind: type[SegmentCache]) -> None:
    cache = kind(2)
    layout = Layout(("x",), ())
    for key, size, keep in (
        (0, 1, True),
        (1, 10, False),
        (2, 100, False),
        (1, 1000, False),
        (3, 10000, False),
        (0, 7, True),
    ):
        segment: Any = SimpleNamespace(
            place=(0,), position=0, shapes=(), host_values=(), layout=layout, key=(key,), needs=None, code_bytes=size
        )
        cache.put(segment, lambda fact: None, keep=keep)
        assert cache.code_bytes == sum(each.code_bytes for each in cache.segments())
    assert cache.code_bytes == 11007
    cache.clear()
    assert cache.code_bytes == 0


CHILD = textwrap.dedent(
    """
    import ctypes, gc, json, os, sys
    import anyio, numpy as np
    import transmuter_async as tm
    from tests.test_runtime import affine, model_bytes, rows
    from onnx import helper

    backend, size, rounds, calls = sys.argv[1], *map(int, sys.argv[2:])
    trim = ctypes.CDLL(None).malloc_trim

    def rss():
        gc.collect()
        trim(0)
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def big():
        w = np.ones((size << 18 >> 10, 1024), np.float32)  # size MiB
        nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
        return model_bytes(nodes, {"x": ["n", w.shape[0]]}, {"y": ["n", 1024]}, w=w)

    async def main():
        data = big()
        x = np.ones((2, size << 18 >> 10), np.float32)
        told = {}
        async with tm.Runtime() as runtime:
            async def trip():
                compiled = await runtime.compile(data, {"x": tm.Spec(x.shape, "float32")})
                await compiled.run({"x": x})
                await compiled.aclose()

            for _ in range(3):  # allocators and thread pools find their size
                await trip()
            held = []
            for _ in range(rounds):
                await trip()
                held.append(rss())
            half = rounds // 2  # what an arena of malloc happens to hold comes and goes: the least of each half counts
            told["per_trip"] = (min(held[half:]) - min(held[:half])) / half
            compiled = await runtime.compile(affine())
            for _ in range(500):
                await compiled.run({"x": rows(2)})
            before = rss()
            for _ in range(calls):
                await compiled.run({"x": rows(2)})
            told["calls"] = rss() - before
            told["hits"] = (await compiled.statistics()).hits
        print(json.dumps(told))

    anyio.run(main, backend=backend)
    """
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and trims glibc's heap")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize(
    ("size", "rounds", "calls"),
    [pytest.param(8, 12, 1000, id="short"), pytest.param(60, 30, 5000, id="full", marks=pytest.mark.slow)],
)
def test_loading_and_closing_gives_back_and_calls_take_nothing(
    backend: str, size: int, rounds: int, calls: int
) -> None:
    done = subprocess.run(  # noqa: PLW1510 - the output tells more than the code
        [sys.executable, "-c", CHILD, backend, *map(str, (size, rounds, calls))],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    print(told)
    assert told["per_trip"] <= 3 << 20, told
    assert told["calls"] <= 1 << 20, told  # a page here and there, but nothing for each call
    assert told["hits"] == 499 + calls
