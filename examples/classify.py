"""Load a model, compile it in an actor, await its answers. On asyncio.

python examples/classify.py
"""

from __future__ import annotations

import asyncio

import numpy as np

import transmuter_async as tm
from transmuter_async.demo import digits_model, digits_test

images, labels = digits_test()


async def main() -> None:
    batch = images[:10, None].astype(np.float32) / 16
    async with tm.Runtime() as runtime:
        model = await runtime.load(digits_model())  # bytes; a path does as well
        compiled = await runtime.compile(model, {"image": tm.Spec(batch.shape, "float32")})
        outputs = await compiled.run({"image": batch})
    print("answers", outputs["probabilities"].argmax(-1))
    print("labels ", labels[:10])


asyncio.run(main())
