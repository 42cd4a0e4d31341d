"""Donated inputs: the memory is really used again, and nothing that anybody still needs is ever consumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import jax
import numpy as np
import onnx
import pytest

import transmuter_async as tm
from tests.compiler.support import Session, assert_same, by_onnxruntime, graph, node, proto
from transmuter_async.compiler import Options

SIZE = 4096
RNG = np.random.default_rng(7)


def counter() -> onnx.ModelProto:
    """total = state + x; seen = state · 2: state float (n), read by two nodes."""
    return proto(
        [
            node("Add", ["state", "x"], ["total"]),
            node("Mul", ["state", "two"], ["doubled"]),
            node("ReduceSum", ["doubled"], ["seen"]),
        ],
        ["state:float[n]", "x:float[n]"],
        ["total:float[n]", "seen:float[1]"],
        {"two": np.float32(2)},
    )


def breaking(*, late: bool) -> onnx.ModelProto:
    """A NonZero in the middle; `late`: the part after it reads the state, too."""
    nodes = [
        node("Add", ["state", "x"], ["total"]),
        node("Greater", ["total", "zero"], ["mask"]),
        node("NonZero", ["mask"], ["where"]),
        node("Transpose", ["where"], ["index"]),
        node("GatherND", ["total", "index"], ["picked"]),
        node("ReduceSum", ["picked"], ["sum"]),
        node("Mul", ["state" if late else "x", "sum"], ["scaled"]),
    ]
    return proto(
        nodes, ["state:float[n]", "x:float[n]"], ["total:float[n]", "scaled:float[n]"], {"zero": np.float32(0)}
    )


def branch() -> onnx.ModelProto:
    """An If on a value, whose then-branch gives the state back as it is; what follows reads both."""
    body = {
        "then_branch": graph([node("Identity", ["state"], ["a"])], [], ["a:float[...]"]),
        "else_branch": graph([node("Concat", ["state", "state"], ["b"], axis=0)], [], ["b:float[...]"]),
    }
    nodes = [
        node("ReduceSum", ["x"], ["s"], keepdims=0),
        node("Greater", ["s", "zero"], ["go"]),
        node("If", ["go"], ["kept"], **body),
        node("Add", ["state", "x"], ["total"]),
        node("NonZero", ["total"], ["where"]),
        node("Shape", ["where"], ["count"]),
        node("ReduceSum", ["kept"], ["last"]),
    ]
    return proto(
        nodes,
        ["state:float[n]", "x:float[n]"],
        ["total:float[n]", "last:float[1]", "count:int64[2]"],
        {"zero": np.float32(0)},
    )


def values() -> np.ndarray:
    return RNG.standard_normal(SIZE).astype(np.float32)


def state_of(session: Session) -> tuple[jax.Array, np.ndarray]:
    """A state that a program has returned, in memory of its own, and its value."""
    first, x = values(), values()
    out = session({"state": first, "x": x}, device=True)["total"]
    assert isinstance(out, jax.Array)
    return out, first + x


def test_the_memory_is_used_again_and_the_state_is_consumed() -> None:
    session = Session(counter(), donate=("state",))
    state, value = state_of(session)
    for _ in range(3):
        where, x = state.unsafe_buffer_pointer(), values()
        out = session({"state": state, "x": x}, device=True)
        assert session.compiled() == 0
        assert state.is_deleted()
        assert out["total"].unsafe_buffer_pointer() == where
        np.testing.assert_allclose(np.array(out["seen"]), [2 * value.sum()], rtol=1e-4)
        value = value + x
        np.testing.assert_allclose(np.array(out["total"]), value, rtol=1e-6)
        state = out["total"]


def test_without_donate_nothing_is_consumed() -> None:
    session = Session(counter())
    state, value = state_of(session)
    out = session({"state": state, "x": values()}, device=True)
    assert not state.is_deleted()
    assert out["total"].unsafe_buffer_pointer() != state.unsafe_buffer_pointer()
    np.testing.assert_array_equal(np.asarray(state), value)


def test_a_consumed_array_given_again_is_named() -> None:
    session = Session(counter(), donate=("state",))
    state, _ = state_of(session)
    session({"state": state, "x": values()})
    for inputs in ({"state": state, "x": values()}, {"state": values(), "x": state}):
        with pytest.raises(tm.InputError, match="is gone: another call"):
            session(inputs)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(state)


@pytest.mark.parametrize("aligned", [False, True])
def test_numpy_inputs_are_unaffected(aligned: bool) -> None:
    session = Session(counter(), donate=("state", "x"))
    room = np.zeros(SIZE * 4 + 128, np.uint8)
    offset = -room.ctypes.data % 64 + (0 if aligned else 4)
    state = room[offset : offset + SIZE * 4].view(np.float32)
    state[:] = before = values()
    x = values()
    copy = x.copy()
    for _ in range(2):
        out = session({"state": state, "x": x})
        np.testing.assert_array_equal(out["total"], before + copy)
        np.testing.assert_array_equal(state, before)
        np.testing.assert_array_equal(x, copy)
        assert not np.shares_memory(out["total"], state)


def test_an_array_that_numpy_looks_at_is_not_consumed() -> None:
    session = Session(counter(), donate=("state",))
    state, value = state_of(session)
    view = np.asarray(state)
    out = session({"state": state, "x": values()}, device=True)
    np.testing.assert_array_equal(view, value)
    np.testing.assert_array_equal(np.asarray(state), value)
    assert not np.shares_memory(np.asarray(out["total"]), view)
    del view
    session({"state": out["total"], "x": values()})
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(out["total"])


@pytest.mark.parametrize("donate", [("state",), ("x",), ("state", "x")])
def test_one_array_under_two_names(donate: tuple[str, ...]) -> None:
    session = Session(counter(), donate=donate)
    state, value = state_of(session)
    out = session({"state": state, "x": state})
    np.testing.assert_allclose(out["total"], 2 * value, rtol=1e-6)
    np.testing.assert_allclose(out["seen"], [2 * value.sum()], rtol=1e-4)
    state, value = state_of(session)
    twin = jax.device_put(state, jax.local_devices()[0])  # another object, the same memory
    np.testing.assert_allclose(session({"state": state, "x": twin})["total"], 2 * value, rtol=1e-6)


@pytest.mark.parametrize("late", [False, True])
def test_only_the_last_segment_that_reads_it_consumes(late: bool) -> None:
    session = Session(breaking(late=late), donate=("state",), min_segment_nodes=1, dense=False)
    plain = Session(breaking(late=late), min_segment_nodes=1, dense=False)
    state, _ = state_of(session)
    donating = [(segment.position, segment.donated) for segment in session.cache.segments() if segment.donated]
    assert donating == ([(3, ("state",))] if late else [(0, ("state",))])
    for _ in range(2):
        kept, x = np.array(state), values()
        out = session({"state": state, "x": x}, device=True)
        assert state.is_deleted()
        assert_same({k: np.array(v) for k, v in out.items()}, plain({"state": kept, "x": x}))
        state = out["total"]


@pytest.mark.parametrize("force", [(), range(0, 100, 2), range(1, 100, 2), range(100)], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("smallest", [1, 20])
def test_a_body_that_gives_the_state_back(force: Any, sign: int, smallest: int) -> None:
    session = Session(branch(), donate=("state", "x"), min_segment_nodes=smallest, force_breaks=force, dense=False)
    for _ in range(2):
        first = {"state": values(), "x": values()}
        x = sign * np.abs(values())
        state = session(first, device=True)["total"]
        inputs = {"state": np.array(state), "x": x}
        got = session({"state": state, "x": jax.device_put(x)})
        assert_same(got, by_onnxruntime(branch(), inputs), rtol=1e-4, atol=1e-4)


def test_a_loop_reads_it_again_and_again() -> None:
    body = graph(
        [node("Add", ["carried", "state"], ["next"]), node("Identity", ["going"], ["on"])],
        ["i:int64[]", "going:bool[]", "carried:float[...]"],
        ["on:bool[]", "next:float[...]"],
    )
    made = proto(
        [
            node("ReduceSum", ["x"], ["s"], keepdims=0),
            node("Cast", ["s"], ["trips"], to=onnx.TensorProto.INT64),
            node("Loop", ["trips", "", "state"], ["total"], body=body),
        ],
        ["state:float[n]", "x:float[n]"],
        ["total:float[n]"],
    )
    for options in ({}, {"min_segment_nodes": 1}, {"min_segment_nodes": 1, "force_breaks": range(3)}):
        session = Session(made, donate=("state",), **options)
        for trips in (0, 3, 5):
            value = values()
            x = np.zeros(SIZE, np.float32)
            x[0] = trips
            got = session({"state": jax.device_put(value), "x": x})
            np.testing.assert_allclose(got["total"], value * (trips + 1), rtol=1e-5)


def test_a_loop_that_gives_the_state_back_as_it_is() -> None:
    """The body's output is its input, so the loop's result is the caller's very array; it is read after the state is consumed."""
    body = graph(
        [node("Identity", ["going"], ["on"]), node("Mul", ["carried", "carried"], ["square"])],
        ["i:int64[]", "going:bool[]", "carried:float[...]"],
        ["on:bool[]", "carried:float[...]", "square:float[...]"],
    )
    made = proto(
        [
            node("ReduceSum", ["x"], ["s"], keepdims=0),
            node("Cast", ["s"], ["trips"], to=onnx.TensorProto.INT64),
            node("Loop", ["trips", "", "state"], ["kept", "squares"], body=body),
            node("Add", ["state", "x"], ["total"]),
            node("NonZero", ["total"], ["where"]),
            node("Shape", ["where"], ["count"]),
            node("Neg", ["kept"], ["last"]),
        ],
        ["state:float[n]", "x:float[n]"],
        ["total:float[n]", "last:float[n]", "count:int64[2]", "squares:float[k,n]"],
    )
    session = Session(made, donate=("state",), min_segment_nodes=1, dense=False)
    x = np.zeros(SIZE, np.float32)
    x[0] = 2
    for _ in range(2):
        state = jax.device_put(values())
        value = np.array(state)
        got = session({"state": state, "x": x})
        assert_same(got, by_onnxruntime(made, {"state": value, "x": x}))


def test_what_an_output_can_not_hold_is_not_consumed() -> None:
    """jax would warn of a donation without use; and there is nothing to win."""
    made = proto(
        [node("ReduceSum", ["state"], ["y"]), node("Abs", ["x"], ["z"])],
        ["state:float[n]", "x:float[n]"],
        ["y:float[1]", "z:float[n]"],
    )
    session = Session(made, donate=("state", "x"))
    state, x = jax.device_put(values()), jax.device_put(values())
    session({"state": state, "x": x})
    segment = session.cache.segments()[0]
    assert segment.donated == ("state",), "it has the shape of z, and is the first that has"
    assert state.is_deleted() and not x.is_deleted()


def test_an_input_that_is_an_output_stays() -> None:
    made = proto(
        [node("Abs", ["x"], ["y"]), node("Identity", ["state"], ["same"])],
        ["state:float[n]", "x:float[n]"],
        ["y:float[n]", "same:float[n]"],
    )
    session = Session(made, donate=("state",), optimize=False)
    state = jax.device_put(values())
    value = np.array(state)
    out = session({"state": state, "x": values()})
    np.testing.assert_array_equal(out["same"], value)


def test_from_the_disk_cache(tmp_path: Path) -> None:
    told = []
    for _ in range(2):
        session = Session(counter(), donate=("state",), cache_dir=str(tmp_path))
        state, value = state_of(session)
        told.append([fact.disk_cache for fact in session.facts if hasattr(fact, "disk_cache")])
        where, x = state.unsafe_buffer_pointer(), values()
        out = session({"state": state, "x": x}, device=True)
        assert state.is_deleted()
        assert out["total"].unsafe_buffer_pointer() == where
        np.testing.assert_allclose(np.array(out["total"]), value + x, rtol=1e-6)
    assert told == [["miss"], ["hit"]]
    other = Session(counter(), cache_dir=str(tmp_path))
    state_of(other)
    assert [fact.disk_cache for fact in other.facts if hasattr(fact, "disk_cache")] == ["miss"], (
        "it is part of the name"
    )


def test_names_that_do_not_fit() -> None:
    with pytest.raises(tm.InputError, match=r"donate=\['z'\] are no inputs"):
        Session(counter(), donate=("z",))
    with pytest.raises(tm.InputError, match="static_inputs, too"):
        Options(donate=("state",), static_inputs=("state",))


async def test_the_function_kept_for_the_specs() -> None:
    specs = {"state": tm.Spec((SIZE,), "float32"), "x": tm.Spec((SIZE,), "float32")}
    async with tm.Runtime() as runtime:
        with pytest.raises(tm.InputError, match="one text"):
            await runtime.compile(counter(), donate="state")
        compiled = await runtime.compile(counter(), specs, donate=["state"])
        value, x = values(), values()
        state = (await compiled.run({"state": value, "x": x}, device=True))["total"]
        value = value + x
        for _ in range(3):
            out = await compiled.run({"state": state, "x": x}, device=True)
            assert state.is_deleted()
            state, value = out["total"], value + x
        np.testing.assert_allclose(np.array(state), value, rtol=1e-6)
        explained = await compiled.explain()
        assert "Donated: state; consumed by programs: state." in str(explained)
        assert explained.segments[0].kept
        consumed = out["total"]
        await compiled.run({"state": consumed, "x": x})
        with pytest.raises(tm.InputError, match="is gone"):
            await compiled.run({"state": consumed, "x": x})
        assert (await compiled.statistics()).failed == 1


async def test_cold_calls_consume_nothing_and_the_program_does() -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(counter(), donate=["state"], cold="interpret")
        state = jax.device_put(values())
        value, x = np.array(state), values()
        async with runtime.telemetry.subscribe("transmuter.segment.compile.stop") as compiles:
            out = await compiled.run({"state": state, "x": x})
            np.testing.assert_allclose(out["total"], value + x, rtol=1e-6)
            assert not state.is_deleted()
            await compiles.receive()
        while (await compiled.statistics()).cache.programs == 0:
            pass
        out = await compiled.run({"state": state, "x": x})
        np.testing.assert_allclose(out["total"], value + x, rtol=1e-6)
        assert state.is_deleted()


@pytest.mark.parametrize("at_once", [1, 2])
async def test_one_state_given_to_two_calls(at_once: int) -> None:
    """One of them has it; the other one is told, and never gets wrong numbers."""
    size = 1 << 18
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(counter(), donate=["state"], max_concurrency=at_once)
        x = np.ones(size, np.float32)
        state = (await compiled.run({"state": np.zeros(size, np.float32), "x": x}, device=True))["total"]
        for step in range(1, 30):
            answers: list[Any] = []

            async def one(state: Any, step: int, answers: list[Any]) -> None:
                try:
                    out = await compiled.run({"state": state, "x": x}, device=True)
                except tm.InputError as error:
                    assert "is gone" in str(error)
                else:
                    assert np.array(out["total"][:3]).tolist() == [step + 1] * 3
                    answers.append(out["total"])

            async with anyio.create_task_group() as group:
                for _ in range(2):
                    group.start_soon(one, state, step, answers)
            assert len(answers) >= 1
            assert state.is_deleted()
            state = answers[0]
        assert (await compiled.statistics()).failed >= (29 if at_once == 1 else 1)
