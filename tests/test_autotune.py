"""`compile(..., autotune=True)`: calls do not wait for it, what differs is out and told, and the disk keeps the choice."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import jax
import ml_dtypes
import numpy as np
import pytest
import structlog
from onnx import helper

import transmuter_async as tm
from tests.compiler.support import Session, node, proto
from tests.conftest import COMPILES
from tests.test_runtime import affine, breaking, expected, model_bytes, rows
from transmuter_async.actors import model as actor_module
from transmuter_async.compiler import Missing, Options, Segment, TuneJob, autotune, pinned, unobserved
from transmuter_async.compiler.disk import _decode, device_facts
from transmuter_async.compiler.job import Built, CompileJob
from transmuter_async.compiler.tuning import Variant
from transmuter_async.operators.xla import FUSIONS, compile_program
from transmuter_async.testing import Recorder
from transmuter_async.version import __version__

RANDOM = np.random.default_rng(3)
TAPS = RANDOM.standard_normal((16, 1, 3, 3)).astype(np.float32)
SQUARE = RANDOM.standard_normal((12, 12)).astype(np.float32)
X = RANDOM.standard_normal((1, 16, 12, 12)).astype(np.float32)
SPEC = {"x": tm.Spec(X.shape, "float32")}
FUSIONS_TRIED = {"fusions: none", "fusions: products and convolutions"}


def convolving() -> bytes:
    """A depthwise convolution, which takes another form on a CPU, and a product: x (n, 16, 12, 12) to y."""
    nodes = [
        helper.make_node("Conv", ["x", "taps"], ["a"], "depthwise", group=16, pads=[1, 1, 1, 1]),
        helper.make_node("MatMul", ["a", "square"], ["y"], "product"),
    ]
    return model_bytes(nodes, {"x": ["n", 16, 12, 12]}, {"y": None}, taps=TAPS, square=SQUARE)


def wanted(x: np.ndarray) -> np.ndarray:
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    found = np.zeros(x.shape)
    for i in range(3):
        for j in range(3):
            found += padded[:, :, i : i + 12, j : j + 12] * TAPS[:, 0, i, j].astype(np.float64)[:, None, None]
    return found @ SQUARE


def assert_right(y: np.ndarray, x: np.ndarray = X) -> None:
    np.testing.assert_allclose(y, wanted(x), rtol=1e-4, atol=1e-4)


class Times:
    """Stands for the clock: says which candidate is fast, and which one's results are to be wrong."""

    def __init__(self) -> None:
        self.fast = ""
        self.wrong = ""
        self._names: dict[int, str] = {}
        self._programs: list[Any] = []

    def trial(self, job: CompileJob, variant: Variant, name: str, observe: Any) -> Built:
        built = TRIAL(job, variant, name, observe)
        if name == self.wrong:
            built = dataclasses.replace(built, segment=spoilt(built.segment))
        self._programs.append(built.segment.program)  # so that no other one has its id
        self._names[id(built.segment.program)] = name
        return built

    def measured(self, one: Segment, *_: Any) -> tuple[int, int]:
        return (500 if self._names[id(one.program)] == self.fast else 1000), 1000


TRIAL = CompileJob.trial


def spoilt(segment: Segment) -> Segment:
    program = segment.program

    class Spoilt:
        def __call__(self, *arguments: Any) -> Any:
            (y,), alarm = program(*arguments)
            return (np.asarray(y) * np.float32(1.01),), alarm

        def memory_analysis(self) -> Any:
            return program.memory_analysis()

        def as_text(self) -> str:
            return "another one"

    return dataclasses.replace(segment, program=Spoilt())


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    found = Times()
    monkeypatch.setattr(autotune, "measured", found.measured)
    monkeypatch.setattr(CompileJob, "trial", lambda *arguments: found.trial(*arguments))
    return found


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Holds every tuning: what tells that one has begun, and what lets it go."""
    begun, go = threading.Event(), threading.Event()
    run = TuneJob.run

    def waiting(job: TuneJob, *arguments: Any) -> Segment | None:
        begun.set()
        while not (go.wait(0.01) or job.stopped.is_set()):
            pass
        return run(job, *arguments)

    monkeypatch.setattr(TuneJob, "run", waiting)
    yield begun, go
    go.set()


# Choosing.


@pytest.mark.parametrize("fast", ["", "fusions: none", "without shifted taps"])
async def test_what_is_chosen_is_used_and_gives_the_same(times: Times, fast: str) -> None:
    times.fast = fast
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(convolving(), SPEC, autotune=True)
        assert_right((await compiled.run({"x": X}))["y"])
        explanation = await compiled.explain(verbose=True)
    (row,) = explanation.tuned
    assert (row.chosen, row.values) == (fast or "default", "drawn")
    forms = f"{fast}; without shifted taps" if "fusions" in fast else "without shifted taps"
    assert {trial.name for trial in row.trials} >= {*FUSIONS_TRIED, forms}
    assert all(trial.nanoseconds or trial.out for trial in row.trials)
    assert f"tuned at 0 (x:float[1, 16, 12, 12]): {row.chosen}" in str(explanation)
    assert "tuned" not in str(dataclasses.replace(explanation, verbose=False))
    taken = {name for each in explanation.lowerings for name in each.names}
    assert ("shifted taps" in taken) is (fast != "without shifted taps")


async def test_a_clock_chooses_as_well() -> None:
    """Nothing is faked here: whatever the machine finds faster, every call is right."""
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(convolving(), autotune=True)
        for count in (1, 2):
            x = np.concatenate([X] * count)
            assert_right((await compiled.run({"x": x}))["y"], x)
            await compiled.warm(())
            assert_right((await compiled.run({"x": x}))["y"], x)
        rows = (await compiled.explain()).tuned
    assert [row.values for row in rows] == ["call", "call"]
    assert all(row.chosen is not None and row.nanoseconds > 0 for row in rows)


async def test_convolutions_are_tried_where_there_are_no_products(times: Times) -> None:
    dense = helper.make_node("Conv", ["x", "filters"], ["y"], "dense", pads=[1, 1, 1, 1])
    filters = np.random.default_rng(3).standard_normal((32, 32, 3, 3)).astype(np.float32)
    model = model_bytes([dense], {"x": ["n", 32, 28, 28]}, {"y": None}, filters=filters)
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(model, {"x": tm.Spec((1, 32, 28, 28), "float32")}, autotune=True)
        (row,) = (await compiled.explain()).tuned
    tried = {trial.name: trial for trial in row.trials}
    assert tried["fusions: none"].out == "the same program"
    assert tried["fusions: convolutions"].nanoseconds


async def test_a_candidate_whose_results_differ_is_out_and_told(times: Times) -> None:
    times.fast = times.wrong = "fusions: none"
    with structlog.testing.capture_logs() as logs:
        async with tm.Runtime() as runtime:
            compiled = await runtime.compile(convolving(), SPEC, autotune=True)
            assert_right((await compiled.run({"x": X}))["y"])
            explanation = await compiled.explain(verbose=True)
    (row,) = explanation.tuned
    assert row.chosen == "default"
    (out,) = [trial for trial in row.trials if trial.wrong]
    assert out.name == "fusions: none"
    assert out.nanoseconds is None
    assert "of 2304 elements of result 0" in str(out.out)
    assert "fusions: none: OUT, results differ" in str(explanation)
    (told,) = [line for line in logs if line["log_level"] == "warning"]
    assert (told["candidate"], told["position"]) == ("fusions: none", 0)


async def test_a_candidate_that_xla_refuses_is_out(times: Times, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = times.trial

    def refused(job: CompileJob, variant: Variant, name: str, observe: Any) -> Built:
        if name == "fusions: none":
            raise tm.CompileError("no such thing")
        return trial(job, variant, name, observe)

    monkeypatch.setattr(times, "trial", refused)
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(convolving(), SPEC, autotune=True)
        (row,) = (await compiled.explain()).tuned
    (out,) = [each for each in row.trials if each.name == "fusions: none"]
    assert out.out == "CompileError: no such thing"
    assert not out.wrong


async def test_what_was_fast_only_once_is_not_chosen(times: Times, monkeypatch: pytest.MonkeyPatch) -> None:
    times.fast = "fusions: none"
    seen: list[Any] = []

    def measured(one: Segment, *rest: Any) -> tuple[int, int]:
        seen.append(rest[-1])
        return (1000, 1000) if rest[-1] > autotune.TURNS else times.measured(one)

    monkeypatch.setattr(autotune, "measured", measured)
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(convolving(), SPEC, autotune=True)
        (row,) = (await compiled.explain()).tuned
    assert row.chosen == "default"
    (again,) = [trial for trial in row.trials if trial.name == "fusions: none"]
    assert (again.ratio, again.out) == (1.0, "measured once more, it was not that fast")
    assert sum(limit > autotune.TURNS for limit in seen) == 1


def test_never_a_kind_that_takes_neighbours_along() -> None:
    for kinds in FUSIONS.values():
        assert all(kind.startswith("LIBRARY_FUSION_TYPE_INDIVIDUAL_") for kind in kinds.split(",") if kind)


@pytest.mark.parametrize("fusions", FUSIONS)
@pytest.mark.compiles_itself
def test_every_set_is_right_where_a_factor_is_one_number_broadcast(fusions: str) -> None:
    x = RANDOM.standard_normal((64, 64)).astype(np.float32)

    def compute(x: Any) -> Any:
        product = x @ jax.numpy.full((64, 64), 2.0, np.float32)
        return product.max(-1), jax.numpy.tanh(product * np.float32(0.01))

    greatest, squashed = compile_program(jax.jit(compute).lower(x), "cpu", fusions)(x)
    product = 2.0 * x.astype(np.float64).sum(-1)
    np.testing.assert_allclose(greatest, product, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(squashed, np.tanh(np.tile(product[:, None], 64) * 0.01), rtol=1e-4, atol=1e-4)


FLOAT8 = ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize(
    ("got", "want", "count"),
    [
        (np.float32([1.0, np.nan, np.inf]), np.float32([1.00001, np.nan, np.inf]), 0),
        (np.float32([1.0, 0.0, np.inf]), np.float32([1.0, np.nan, -np.inf]), 2),
        (np.float32([1e-9, 1.0]), np.float32([0.0, 1.0]), 0),
        (np.float32([1.001]), np.float32([1.0]), 1),
        (np.float64([1 + 1e-7]), np.float64([1.0]), 1),
        (np.complex64([1 + 1j]), np.complex64([1 + 1.1j]), 1),
        (np.array([1.0, 1.01], ml_dtypes.bfloat16), np.array([1.0, 1.02], ml_dtypes.bfloat16), 0),
        (np.array([1.0, 1.125], FLOAT8), np.array([1.0, 1.0], FLOAT8), 1),
        (np.array([np.nan], FLOAT8), np.array([np.nan], FLOAT8), 0),
        (np.array([3, 4]), np.array([3, 5]), 1),
        (np.array([True]), np.array([False]), 1),
    ],
)
def test_what_counts_as_the_same(got: np.ndarray, want: np.ndarray, count: int) -> None:
    assert autotune._beyond(got, want) == count


# On the disk.


async def test_the_choice_survives_on_the_disk(times: Times, tmp_path: Path) -> None:
    times.fast = "fusions: none"
    told = []
    for _ in range(2):
        COMPILES.by_jax.clear()
        COMPILES.told.clear()
        async with tm.Runtime() as runtime:
            compiled = await runtime.compile(convolving(), SPEC, autotune=True, cache_dir=tmp_path)
            assert_right((await compiled.run({"x": X}))["y"])
            told.append((await compiled.explain()).tuned)
    assert COMPILES.by_jax == []
    assert told[0] == told[1]
    assert told[1][0].chosen == "fusions: none"


async def test_what_was_stopped_before_it_was_tuned_is_tuned_by_the_next(
    times: Times, tmp_path: Path, held: tuple[threading.Event, threading.Event]
) -> None:
    begun, go = held
    times.fast = "without shifted taps"
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(convolving(), autotune=True, cache_dir=tmp_path)
        assert_right((await compiled.run({"x": X}))["y"])
        await anyio.to_thread.run_sync(begun.wait)
    go.set()
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry) as recorder:
        compiled = await runtime.compile(convolving(), autotune=True, cache_dir=tmp_path)
        assert_right((await compiled.run({"x": X}))["y"])
        await compiled.warm(())
        assert (await compiled.explain()).tuned[0].chosen == "without shifted taps"
        hit = recorder.named("transmuter.segment.compile.stop")[0]
        assert hit.metadata["disk_cache"] == "hit"


CHILD = """
import json, sys
import anyio, jax
import transmuter_async as tm
from tests.test_autotune import X, assert_right, convolving
compiles = 0
def heard(event, duration, **facts):
    global compiles
    compiles += event == "/jax/core/compile/backend_compile_duration"
jax.monitoring.register_event_duration_secs_listener(heard)
async def main():
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(convolving(), autotune=True, cache_dir=sys.argv[1])
        assert_right((await compiled.run({"x": X}))["y"])
        await compiled.warm(())
        assert_right((await compiled.run({"x": X}))["y"])
        return (await compiled.explain()).to_dict()["tuned"]
tuned = anyio.run(main, backend=sys.argv[2])
print(json.dumps([compiles, tuned]))
"""


@pytest.mark.parametrize("backend", [pytest.param("asyncio"), pytest.param("trio", marks=pytest.mark.slow)])
def test_a_second_process_neither_tunes_nor_compiles(tmp_path: Path, backend: str) -> None:
    found = []
    for _ in range(2):
        child = subprocess.run(
            [sys.executable, "-c", CHILD, str(tmp_path), backend],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        found.append(json.loads(child.stdout))
    (first, tuned), (second, again) = found
    assert first > 4
    assert second == 0
    assert tuned == again
    assert tuned[0]["chosen"] is not None


@pytest.mark.compiles_itself
def test_it_is_part_of_the_names_of_files_and_off_changes_none(tmp_path: Path) -> None:
    made = proto([node("Sin", ["x"], ["y"])], ["x:float[a]"], ["y:float[a]"])
    x = np.arange(4, dtype=np.float32)
    plain = Session(made, cache_dir=str(tmp_path))
    plain({"x": x})
    (before,) = tmp_path.glob("*.segment")
    record, _, _ = _decode(before.read_bytes(), before.stem)
    assert "tuning" not in record
    prepared = plain.prepared
    assert "autotune" not in repr(prepared.options)
    options = dataclasses.replace(prepared.options, cache_dir=None, cache_dir_bytes=0, cache_size=1)
    facts = (__version__, options, sorted(prepared.dim_like), device_facts(prepared.device))
    assert prepared.digest() == hashlib.sha256((repr(facts) + prepared.contents()).encode()).hexdigest()
    tuned = Session(made, cache_dir=str(tmp_path), autotune=True)
    tuned({"x": x})
    assert [fact.disk_cache for fact in tuned.facts if type(fact).__name__ == "SegmentReady"] == ["miss"]  # type: ignore[union-attr]
    assert len(list(tmp_path.glob("*.segment"))) == 2


async def test_off_there_is_nothing_to_tell() -> None:
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry) as recorder:
        compiled = await runtime.compile(convolving(), SPEC)
        await compiled.run({"x": X})
        await compiled.warm(())
        explanation = await compiled.explain(verbose=True)
        assert explanation.tuned == ()
        assert "tuned" not in str(explanation)
        assert len(recorder.named("transmuter.segment.compile.stop")) == 1


# Beside calls.


async def test_no_call_waits_for_it(
    times: Times, held: tuple[threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a single program is compiled at a time."""
    begun, go = held
    times.fast = "fusions: none"
    monkeypatch.setattr(actor_module, "cores", lambda: 1)
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(convolving(), autotune=True)
        await compiled.run({"x": X})
        await anyio.to_thread.run_sync(begun.wait)
        for count in (2, 3):
            x = np.concatenate([X] * count)
            assert_right((await compiled.run({"x": x}))["y"], x)
        assert [row.chosen for row in (await compiled.explain(verbose=True)).tuned] == [None] * 3
        assert "not yet" in str(await compiled.explain(verbose=True))
        go.set()
        await compiled.warm(())
        assert [row.chosen for row in (await compiled.explain()).tuned] == ["fusions: none"] * 3
        assert_right((await compiled.run({"x": X}))["y"])


async def test_every_compile_is_told_and_counted(times: Times) -> None:
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry) as recorder:
        compiled = await runtime.compile(convolving(), autotune=True)
        await compiled.run({"x": X})
        await compiled.warm(())
        spans = recorder.named("transmuter.segment.compile.stop")
        tried = [span.metadata["tuning"] for span in spans if span.metadata.get("tuning")]
        assert set(tried) >= {"default", *FUSIONS_TRIED, "without shifted taps"}
        assert all(span.metadata["background"] for span in spans if span.metadata.get("tuning"))
        assert "tuning" not in spans[0].metadata
        assert (await compiled.statistics()).compiles == len(spans) == len(tried) + 1


async def test_it_ends_with_the_actor(held: tuple[threading.Event, threading.Event]) -> None:
    begun, _ = held
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(convolving(), autotune=True)
        await compiled.run({"x": X})
        await anyio.to_thread.run_sync(begun.wait)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:

                async def wait() -> None:
                    with pytest.raises(tm.ActorStopped):
                        await compiled.warm(())

                group.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                await compiled.aclose()


async def test_an_actor_that_crashed_tunes_anew(times: Times, held: tuple[threading.Event, threading.Event]) -> None:
    begun, go = held
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(convolving(), autotune=True)
        await compiled.run({"x": X})
        await anyio.to_thread.run_sync(begun.wait)
        compiled._actor.crash(RuntimeError("on purpose"))
        go.set()
        while True:
            try:
                assert_right((await compiled.run({"x": X}))["y"])
                break
            except tm.ActorStopped:
                await anyio.lowlevel.checkpoint()
        await compiled.warm(())
        assert [row.chosen for row in (await compiled.explain()).tuned] == ["default"]


async def test_a_tuning_that_fails_changes_nothing(times: Times, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Built:
        raise MemoryError("all gone")

    monkeypatch.setattr(times, "trial", failing)
    with structlog.testing.capture_logs() as logs:
        async with tm.Runtime() as runtime:
            compiled = await runtime.compile(convolving(), SPEC, autotune=True)
            assert_right((await compiled.run({"x": X}))["y"])
            assert [row.chosen for row in (await compiled.explain()).tuned] == [None]
    assert [line["reason"] for line in logs if line["log_level"] == "warning"] == ["MemoryError: all gone"]


async def test_inputs_that_can_not_be_copied_cost_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(value: Any) -> Any:
        raise MemoryError("all gone")

    monkeypatch.setattr(autotune, "_owned", failing)
    with structlog.testing.capture_logs() as logs:
        async with tm.Runtime() as runtime:
            compiled = await runtime.compile(convolving(), autotune=True)
            assert_right((await compiled.run({"x": X}))["y"])
            await compiled.warm(())
    assert [line["reason"] for line in logs if line["log_level"] == "warning"] == ["MemoryError: all gone"]


async def test_segments_around_a_break_and_programs_behind_a_cold_call(times: Times) -> None:
    x = np.array([1, -2, 3, -4], np.float32)
    async with tm.Runtime() as runtime:
        plain = await runtime.compile(breaking(), min_segment_nodes=1)
        compiled = await runtime.compile(breaking(), min_segment_nodes=1, autotune=True)
        want = (await plain.run({"x": x}))["y"]
        np.testing.assert_array_equal((await compiled.run({"x": x}))["y"], want)
        await compiled.warm(())
        np.testing.assert_array_equal((await compiled.run({"x": x}))["y"], want)
        rows_of_it = (await compiled.explain()).tuned
        assert len(rows_of_it) == 2
        assert all(row.chosen == "default" for row in rows_of_it)
        cold = await runtime.compile(affine(), cold="interpret", autotune=True, max_concurrency=2)
        for _ in range(2):
            np.testing.assert_allclose((await cold.run({"x": rows(2)}))["y"], expected(rows(2)), rtol=1e-5)
            await cold.warm({"x": tm.Spec((2, 4), "float32")})
        assert [row.chosen for row in (await cold.explain()).tuned] == ["default"]


async def test_a_donated_input(times: Times) -> None:
    times.fast = "fusions: none"
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(convolving(), autotune=True, donate=["x"])
        for _ in range(2):
            x = jax.device_put(X)
            assert_right(np.asarray((await compiled.run({"x": x}, device=True))["y"]))
            await compiled.warm(())
        assert [row.chosen for row in (await compiled.explain()).tuned] == ["fusions: none"]


async def test_misuse() -> None:
    async with tm.Runtime() as runtime:
        with pytest.raises(tm.MisuseError, match="eager"):
            await runtime.compile(affine(), autotune=True, compiler="eager")
        with pytest.raises(tm.MisuseError, match="sharding"):
            await runtime.compile(affine(), autotune=True, sharding="batch", batching=tm.Batching(batch="n"))
    assert Options(autotune=True) != Options()


# What is measured with.


def job_of(session: Session, inputs: dict[str, Any]) -> tuple[CompileJob, Segment]:
    execution = session.prepared.start(session.prepared.take_inputs(inputs), seed=0, device=False)
    with pinned():
        step = execution.advance(session.cache, unobserved)
        assert isinstance(step, Missing)
        return step.job, step.job.run(unobserved)


def ticking(step: int) -> autotune.Clock:
    """A clock that goes on by `step` nanoseconds whenever it is read."""
    now = 0

    def clock() -> int:
        nonlocal now
        now += step
        return now

    return clock


PICKING = proto([node("Gather", ["x", "i"], ["y"], axis=0)], ["x:float[n,m]", "i:int64[a,b]"], ["y:float[a,b,m]"])


@pytest.mark.compiles_itself
def test_the_values_of_the_call_are_copied() -> None:
    inputs = {"x": np.arange(6, dtype=np.float32).reshape(3, 2), "i": np.array([[2, 1]])}
    job, segment = job_of(Session(PICKING, autotune=True), inputs)
    found = TuneJob.of(job, segment)
    assert found is not None
    assert not found.drawn
    for array in job.values.values():
        array.flags.writeable = True
        array[...] = 7
    (arguments,) = found.inputs()
    given = dict(zip(segment.arguments, arguments, strict=True))
    np.testing.assert_array_equal(given["i"], [[2, 1]])
    np.testing.assert_array_equal(given["x"], [[0, 1], [2, 3], [4, 5]])
    assert found.run(unobserved, ticking(autotune.TURNS)) is not None


@pytest.mark.compiles_itself
def test_what_is_drawn_has_valid_indices() -> None:
    session = Session(PICKING, autotune=True)
    job = session.prepared.spec_job({"x": tm.Spec((3, 2), "float32"), "i": tm.Spec((1, 2), "int64")})
    assert job is not None
    segment = job.run(unobserved)
    found = TuneJob.of(job, segment)
    assert found is not None
    assert found.drawn
    first, second = (dict(zip(segment.arguments, each, strict=True)) for each in found.inputs())
    assert not first["i"].any()
    assert len(np.unique(first["x"])) == len(np.unique(second["x"])) == 6
    assert (first["x"] < 0).any()
    assert (second["x"] >= 0).all()
    tuned = found.run(unobserved, ticking(autotune.TURNS))
    assert tuned is not None
    assert tuned.tuning is not None
    assert not tuned.tuning.wrong


@pytest.mark.compiles_itself
def test_no_candidate_is_begun_when_the_time_is_up() -> None:
    session = Session(convolving_proto(), autotune=True)
    job, segment = job_of(session, {"x": X})
    found = TuneJob.of(job, segment)
    assert found is not None
    tuned = found.run(unobserved, ticking(autotune.BUDGET))
    assert tuned is not None
    assert tuned.tuning is not None
    assert tuned.tuning.chosen == "default"
    assert {trial.out for trial in tuned.tuning.trials} == {"not tried: the time was up"}


@pytest.mark.compiles_itself
def test_weights_of_what_was_only_tried_are_let_go() -> None:
    session = Session(convolving_proto(), autotune=True)
    job, segment = job_of(session, {"x": X})
    before = session.prepared.noted_weights()
    found = TuneJob.of(job, segment)
    assert found is not None
    found.run(unobserved, ticking(autotune.TURNS))
    assert session.prepared.noted_weights() == before


def convolving_proto() -> Any:
    weights = {"taps": TAPS, "square": SQUARE}
    nodes = [node("Conv", ["x", "taps"], ["a"], group=16, pads=[1] * 4), node("MatMul", ["a", "square"], ["y"])]
    return proto(nodes, ["x:float[n,16,12,12]"], ["y:float[n,16,12,12]"], weights)


@pytest.mark.compiles_itself
def test_a_loop_is_never_run_on_drawn_values() -> None:
    """It may end on some values only."""
    body = helper.make_graph(
        [
            node("Mul", ["v", "half"], ["w"]),
            node("ReduceMax", ["w"], ["top"], keepdims=0),
            node("Greater", ["top", "half"], ["on"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", 7, []),
            helper.make_tensor_value_info("c", 9, []),
            helper.make_tensor_value_info("v", 1, [4]),
        ],
        [helper.make_tensor_value_info("on", 9, []), helper.make_tensor_value_info("w", 1, [4])],
    )
    nodes = [node("Loop", ["", "yes", "x"], ["y"], body=body)]
    made = proto(nodes, ["x:float[4]"], ["y:float[4]"], {"yes": np.array(True), "half": np.array(0.5, np.float32)})
    session = Session(made, autotune=True)
    job = session.prepared.spec_job({"x": tm.Spec((4,), "float32")})
    assert job is not None
    segment = job.run(unobserved)
    found = TuneJob.of(job, segment)
    assert found is not None, "the loop is part of a program"
    tuned = found.run(unobserved, ticking(autotune.TURNS))
    assert tuned is not None
    assert tuned.tuning is not None
    assert tuned.tuning.trials == ()
    assert "loop" in tuned.tuning.note
    x = np.array([8, 1, 2, 4], np.float32)
    np.testing.assert_array_equal(session({"x": x})["y"], x / 16)
