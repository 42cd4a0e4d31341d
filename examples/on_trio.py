"""Many tasks of a trio nursery share one handle; those that have waited long enough give up, and harm nobody.

python examples/on_trio.py
"""

from __future__ import annotations

import numpy as np
import trio

import transmuter_async as tm
from transmuter_async.demo import digits_model, digits_test

images, labels = digits_test()


async def main() -> None:
    right = 0

    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(digits_model(), {"image": tm.Spec((1, 1, 8, 8), "float32")})

        async def ask(index: int) -> None:
            nonlocal right
            with trio.move_on_after(30) as scope:
                outputs = await compiled.run({"image": images[index, None, None].astype(np.float32) / 16})
                right += int(outputs["probabilities"].argmax() == labels[index])
            if scope.cancelled_caught:
                print("gave up on", index)

        async with trio.open_nursery() as nursery:
            for index in range(50):
                nursery.start_soon(ask, index)
    print(f"{right} of 50 right")


trio.run(main)
