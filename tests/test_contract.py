"""One scripted run over everything, and what each step of it tells: the table of the events, each as often as it says.

The list of every event is `CATALOGUE`; docs/telemetry.md names the same ones.
"""

from __future__ import annotations

import functools
import importlib
import re
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from onnx import helper

import transmuter_async as tm
from tests.hub.fake_hub import FakeHub, Fault, Lfs
from tests.hub.support import World, in_worker
from tests.test_runtime import affine, breaking, expected, heavy, model_bytes, rows
from transmuter_async.compiler.disk import DiskCache
from transmuter_async.hub import HubClient, HubError
from transmuter_async.telemetry import CATALOGUE, Telemetry
from transmuter_async.testing import HeldCompiler, Recorder

DOCS = Path(__file__).resolve().parents[1] / "docs" / "telemetry.md"
SPEC = {"x": tm.Spec((2, 4), "float32")}
PROGRESS = "transmuter.hub.download.progress"


async def fails(serving: tm.Serving, x: np.ndarray) -> None:
    """A request that is answered with the error of a compile."""
    with pytest.raises(RuntimeError, match="no"):
        await serving.run({"x": x})


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with FakeHub() as fake:
        yield World(fake, tmp_path / "hub")


class Script:
    """Steps, and what each may tell."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.seen: Counter[str] = Counter()
        self.spans: dict[int, tuple[str, dict[str, Any]]] = {}
        self.calls: set[int] = set()

    @asynccontextmanager
    async def step(self, *names: str, **counts: int) -> AsyncIterator[None]:
        """What happens inside emits exactly `names` (a span's name stands for its start and stop) and nothing else."""
        self.take()
        yield
        wanted: Counter[str] = Counter()
        for name in names:
            spans = (f"transmuter.{name}.start", f"transmuter.{name}.stop")
            if name.endswith("!"):
                base = f"transmuter.{name[:-1]}"
                wanted.update((f"{base}.start", f"{base}.exception"))
            elif spans[0] in CATALOGUE:
                wanted.update(spans)
            else:
                wanted[f"transmuter.{name}"] += 1
        with anyio.move_on_after(10):
            while sum(Counter(self.recorder.names()).values()) < wanted.total():  # what is told behind a call
                await anyio.lowlevel.checkpoint()
        found = self.take()
        progress = found.pop(PROGRESS, 0)  # at most ten a second: how many there are is the clock's to say
        assert progress >= wanted.pop(PROGRESS, 0)
        assert found == wanted, (names, found - wanted, wanted - found)

    def take(self) -> Counter[str]:
        """Check what was told since the last time against the rules for all events."""
        found: Counter[str] = Counter()
        for event in self.recorder.events:
            kind = CATALOGUE[event.name]
            assert set(kind.measurements) <= set(event.measurements), event
            assert set(kind.metadata) <= set(event.metadata), event
            assert all(type(value) in (int, float) for value in event.measurements.values()), event
            base, _, part = event.name.rpartition(".")
            facts = dict(event.metadata)
            if "call" in facts:
                assert facts["call"] in self.calls, event
                assert facts["parent"] in self.calls or facts["parent"] in self.spans, event
            if part == "start" and "span" in facts:
                assert facts["span"] not in self.spans
                self.spans[facts["span"]] = (base, facts)
                if base == "transmuter.call":
                    self.calls.add(facts["span"])
            elif part in ("stop", "exception") and "span" in facts:
                name, begun = self.spans.pop(facts["span"])
                assert name == base
                changes = {
                    "shapes",
                    "source",
                }  # a compiled segment can have fewer arguments; a Hub load learns its file
                assert {k: v for k, v in begun.items() if k not in changes}.items() <= facts.items(), event
            found[event.name] += 1
        self.recorder.clear()
        self.seen += found
        return found


@pytest.mark.compiles_itself  # `apply` outside of a trace
async def test_the_whole_contract(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 512 * 256 * 4
    bus = Telemetry()
    hub = HubClient(telemetry=bus, environment=world.environment(metadata_timeout=30, download_timeout=30))
    path = tmp_path / "affine.onnx"
    path.write_bytes(affine())
    await in_worker(world.fake.repo().commit, {"onnx/model.onnx": Lfs(affine())})
    async with Recorder(bus) as recorder:
        script = Script(recorder)
        step = script.step
        async with tm.Runtime(telemetry=bus, hub=hub, memory_limit=20 * size) as runtime:
            # Load.
            async with step("load"):
                await runtime.load(path)
            async with step("load!"):
                with pytest.raises(tm.InvalidModel):
                    await runtime.load(b"nothing")
            async with step("load", "hub.info", "hub.download", "hub.download.progress"):
                await runtime.load("hf://org/m/onnx/model.onnx")
            async with step("load", "hub.info", "hub.hit"):
                await runtime.load("hf://org/m/onnx/model.onnx")
            await in_worker(world.fake.repo().commit, {"onnx/model.onnx": Lfs(affine() + b"")})
            world.fake.fault("info", "main", Fault(status=404), always=True)
            async with step("load!", "hub.info!"):
                with pytest.raises(HubError):
                    await runtime.load("hf://org/absent/onnx/model.onnx")

            # A graph without breaks: the kept function, the cache, eviction, advice.
            async with step("load", "compile", "segment.compile", "actor.started"):
                compiled = await runtime.compile(path, SPEC, cache_size=1)
            async with step("call"):
                await compiled.run({"x": rows(2)})
            async with step("call", "cache.miss", "segment.compile"):
                await compiled.run({"x": rows(3)})
            async with step("call", "cache.hit"):
                await compiled.run({"x": rows(3)})
            for count in (4, 5):
                async with step("call", "cache.miss", "segment.compile", "cache.evict"):
                    await compiled.run({"x": rows(count)})
            async with step("call", "cache.miss", "segment.compile", "cache.evict", "cache.advice"):
                await compiled.run({"x": rows(6)})
            for count in (7, 8):
                async with step("call", "cache.miss", "segment.compile", "cache.evict"):  # said once
                    await compiled.run({"x": rows(count)})
            async with step("segment.compile", "cache.evict"):
                await compiled.warm({"x": tm.Spec((9, 4), "float32")})
            async with step():
                await compiled.explain()
                await compiled.statistics()
                await compiled.why({"x": rows(2)})

            # Calls that fail, leave, are refused.
            async with step("call!"):
                with pytest.raises(tm.InputError):
                    await compiled.run({"x": np.zeros((1, 1), np.float32)})
            async with step("call!", "queue.rejected"):
                with pytest.raises(tm.DeadlineExceeded):
                    await compiled.run({"x": rows(2)}, timeout=0.0)
            async with step("call!", "cache.miss", "queue.rejected", "segment.compile!"):
                with HeldCompiler(compiled) as held:
                    async with anyio.create_task_group() as group:
                        group.start_soon(compiled.run, {"x": rows(10)})
                        await held.wait_started()
                        group.cancel_scope.cancel()
                    held.fail(ValueError("no"))
            async with step("call!", "call!", "cache.miss", "segment.compile!", "cache.miss"):
                with HeldCompiler(compiled) as held:
                    held.fail(ValueError("no"))
                    for _ in range(2):  # the second is answered with the error of the first
                        with pytest.raises(ValueError, match="no"):
                            await compiled.run({"x": rows(11)})

            # A crash; memory; the end.
            async with step("actor.restarted", "call", "cache.miss", "segment.compile"):
                compiled._actor.crash(RuntimeError("injected"))
                await compiled.run({"x": rows(2)})  # also of the shapes given to compile
            async with step(*["memory.stats"] * len(await runtime.memory_statistics())):
                await runtime.memory_statistics()
            async with step("actor.stopped"):
                await compiled.aclose()
            async with step("call!"):
                with pytest.raises(tm.ActorStopped):
                    await compiled.run({"x": rows(2)})

            # A graph that breaks.
            async with step("load", "compile", "segment.compile", "actor.started"):
                compiled = await runtime.compile(breaking(), {"x": tm.Spec((4,), "float32")})
            x = np.array([1, -2, 3, -4], np.float32)
            async with step("call", "cache.hit", "break", "cache.miss", "segment.compile"):  # a small one, not compiled
                await compiled.run({"x": x})
            async with step("call", "cache.hit", "break", "cache.hit"):
                await compiled.run({"x": x})
            async with step("actor.stopped"):
                await compiled.aclose()
            async with step("load", "compile!", "segment.compile!", "actor.stopped"):
                with pytest.raises(tm.BreakRefused):
                    await runtime.compile(breaking(), {"x": tm.Spec((4,), "float32")}, breaks="error")

            # Tiers without programs.
            async with step("load", "compile", "actor.started", "call", "actor.stopped"):
                compiled = await runtime.compile(path, SPEC, compiler="eager")
                await compiled.run({"x": rows(2)})
                await compiled.aclose()
            async with step("load", "compile", "actor.started"):
                compiled = await runtime.compile(path, cold="interpret", compile_after=2)
            async with step("call", "cache.miss"):
                await compiled.run({"x": rows(2)})
            async with step("call", "cache.miss", "segment.compile"):  # behind it
                await compiled.run({"x": rows(2)})
                while compiled._actor._book.current:  # until it is in its place
                    await anyio.lowlevel.checkpoint()
            async with step("call", "cache.hit", "actor.stopped"):
                await compiled.run({"x": rows(2)})
                await compiled.aclose()

            # Files of programs.
            folder = tmp_path / "programs"
            for disk in ("miss", "hit"):
                async with step("load", "compile", "actor.started", "segment.compile", "actor.stopped"):
                    await (await runtime.compile(path, SPEC, cache_dir=folder)).aclose()
                    (stop,) = recorder.named("transmuter.segment.compile.stop")
                    assert stop.metadata["disk_cache"] == disk
            small = functools.partial(DiskCache, limit=1)
            with monkeypatch.context() as patch:
                module = importlib.import_module("transmuter_async.compiler.prepare")  # the name is also a function's
                patch.setattr(module, "DiskCache", lambda folder, limit: small(folder))
                other = {"x": tm.Spec((3, 4), "float32")}
                async with step(
                    "load", "compile", "actor.started", "segment.compile", "disk_cache.evict", "actor.stopped"
                ):
                    await (await runtime.compile(path, other, cache_dir=folder)).aclose()
            await in_worker(shutil.rmtree, folder)
            compiled = await runtime.compile(path, cache_dir=folder)
            await in_worker(shutil.rmtree, folder, True)
            folder.write_text("in the way")
            async with step("call", "cache.miss", "segment.compile", "disk_cache.error", "actor.stopped"):
                await compiled.run({"x": rows(2)})
                await compiled.aclose()

            # to_jax, outside of a trace.
            model = await runtime.load(path)
            apply, params = await in_worker(lambda: tm.to_jax(model, telemetry=bus))
            async with step("run"):
                await in_worker(lambda: np.asarray(apply(params, {"x": rows(2)})["y"]))
            async with step("run!"):
                with pytest.raises(tm.InputError):
                    await in_worker(lambda: apply(params, {}))

            # Batches.
            async with step("load", "compile", "segment.compile", "actor.started"):
                compiled = await runtime.compile(path, SPEC)
            async with runtime.serve(compiled, batch_size=2) as serving:
                script.take()
                async with step("batch", "call"):
                    found = await serving.run({"x": rows(2)})
                np.testing.assert_allclose(found["y"], expected(rows(2)), rtol=1e-5, atol=1e-6)
            # One that fails, of two requests: each is tried again alone, and as all fail the breaker opens for a moment.
            async with runtime.serve(compiled, batch_size=4, batch_timeout=10) as serving:
                script.take()
                with HeldCompiler(compiled) as held:
                    for _ in range(3):
                        held.fail(RuntimeError("no"))
                    all_fail = step(*["batch!", "segment.compile!"] * 3, "breaker.opened")
                    async with all_fail, anyio.create_task_group() as group:
                        group.start_soon(fails, serving, rows(3))
                        group.start_soon(fails, serving, rows(1))
                opened = serving._actor.clock()
                monkeypatch.setattr(serving._actor, "clock", lambda: opened + 10**10)
                async with step("batch", "call", "breaker.closed"):
                    await serving.run({"x": rows(2)})
            await compiled.aclose()
            script.take()

        # The budget.
        async with tm.Runtime(telemetry=bus, memory_limit=2 * size) as runtime:
            spec = {"x": tm.Spec((2, 512), "float32")}
            models = [await runtime.compile(heavy(seed), spec, name=f"m{seed}") for seed in range(2)]
            script.take()
            async with step("load", "compile", "segment.compile", "actor.started", "memory.release", "memory.release"):
                models.append(await runtime.compile(heavy(2), spec))
            async with step(
                *("call", "cache.miss", "segment.compile"),  # the kept function went, too
                *("memory.restore", "memory.restore", "memory.release", "memory.release"),
            ):
                await models[0].run({"x": np.ones((2, 512), np.float32)})
        script.take()
    assert script.spans == {}
    told = {name.removeprefix("transmuter.") for name in script.seen}
    missing = {name.removeprefix("transmuter.") for name in CATALOGUE} - told
    assert missing == {"hub.download.exception", "break.exception"}  # see below


async def test_spans_that_fail(world: World) -> None:
    bus = Telemetry()
    hub = HubClient(telemetry=bus, environment=world.environment(download_timeout=30))
    await in_worker(world.fake.repo().commit, {"model.onnx": Lfs(affine() * 4000)})
    world.fake.fault("cdn", "model.onnx", Fault(stall=1000))
    async with Recorder(bus) as recorder, tm.Runtime(telemetry=bus, hub=hub) as runtime:
        script = Script(recorder)
        async with script.step("load!", "hub.info", "hub.download!"), anyio.create_task_group() as group:
            group.start_soon(runtime.load, "hf://org/m/model.onnx")
            with anyio.fail_after(10):
                while world.fake.asked("cdn") == []:
                    await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        nodes = [
            helper.make_node("ReduceSum", ["x"], ["limit"], keepdims=0),
            helper.make_node("Range", ["zero", "limit", "zero"], ["y"]),
        ]
        compiled = await runtime.compile(model_bytes(nodes, {"x": ["n"]}, {"y": ["k"]}, zero=np.zeros((), np.float32)))
        script.take()
        async with script.step("call!", "cache.miss", "segment.compile", "break!"):
            with pytest.raises(tm.OperatorError):
                await compiled.run({"x": np.ones(3, np.float32)})
        script.take()
    assert script.spans == {}


def test_the_page_names_every_event() -> None:
    text = DOCS.read_text("utf-8")
    named: set[str] = set()
    for row in re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE):
        last = ""
        for name in re.findall(r"`([a-z_.]+)`", row):
            last = last.rpartition(".")[0] + name if name.startswith(".") else name
            named |= (
                {f"{last}.{part}" for part in ("start", "stop", "exception")}
                if f"transmuter.{last}.start" in CATALOGUE
                else {last}
            )
    assert {f"transmuter.{name}" for name in named} == set(CATALOGUE)
