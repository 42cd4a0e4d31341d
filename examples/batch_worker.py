"""Drain a queue with a few workers that share one compiled model; what they can't keep up with waits outside.

python examples/batch_worker.py
"""

from __future__ import annotations

import anyio
import numpy as np
from anyio.streams.memory import MemoryObjectReceiveStream

import transmuter_async as tm
from transmuter_async.demo import digits_model, digits_test

WORKERS = 4


async def work(
    compiled: tm.Compiled, jobs: MemoryObjectReceiveStream[tuple[int, np.ndarray]], found: dict[int, int]
) -> None:
    async with jobs:
        async for number, image in jobs:
            outputs = await compiled.run({"image": image[None]})
            found[number] = int(outputs["probabilities"].argmax())


async def main() -> None:
    images, labels = digits_test()
    images = images[:, None].astype(np.float32) / 16
    found: dict[int, int] = {}
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(digits_model(), {"image": tm.Spec((1, 1, 8, 8), "float32")})
        send, receive = anyio.create_memory_object_stream[tuple[int, np.ndarray]](WORKERS)
        async with anyio.create_task_group() as tasks:
            for _ in range(WORKERS):
                tasks.start_soon(work, compiled, receive.clone(), found)
            receive.close()
            async with send:
                for number, image in enumerate(images[:200]):
                    await send.send((number, image))
        statistics = await compiled.statistics()
    right = sum(found[number] == int(labels[number]) for number in found)
    print(f"{right} of {len(found)} right; {statistics.compiles} program, {statistics.answered} calls")


anyio.run(main)
