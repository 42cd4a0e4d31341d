"""Listen to what happens inside: loads, compiles, calls, the cache.

python examples/subscribe.py
"""

from __future__ import annotations

import anyio
import numpy as np

import transmuter_async as tm
from transmuter_async.demo import digits_model


async def main() -> None:
    async with (
        tm.Runtime() as runtime,
        anyio.create_task_group() as tasks,
        runtime.telemetry.subscribe("transmuter") as events,
    ):

        async def listen() -> None:
            async for event in events:
                duration = event.measurements.get("duration")
                print(event.name, "" if duration is None else f"{duration / 1e6:.2f} ms", event.metadata.get("shapes", ""))

        tasks.start_soon(listen)
        compiled = await runtime.compile(digits_model(), cache_size=2)
        for count in (1, 2, 1, 3):  # the third shape takes the place of the least recently used one
            await compiled.run({"image": np.zeros((count, 1, 8, 8), np.float32)})
        print(await compiled.statistics())
        events.close()


anyio.run(main)
