"""A small web service around a model, and a client that asks it. The runtime lives as long as the service.

python examples/service.py
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
from aiohttp import ClientSession, web

import transmuter_async as tm
from transmuter_async.demo import digits_model, digits_test

MODEL = web.AppKey("model", tm.Compiled)


async def lifespan(app: web.Application) -> AsyncIterator[None]:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(digits_model())
        await compiled.warm({"image": tm.Spec((1, 1, 8, 8), "float32")})  # before the first request
        app[MODEL] = compiled
        yield


async def classify(request: web.Request) -> web.Response:
    image = np.asarray(await request.json(), np.float32).reshape(1, 1, 8, 8)
    try:
        outputs = await request.app[MODEL].run_nowait({"image": image}, timeout=2)
    except (tm.Overloaded, tm.DeadlineExceeded) as error:
        return web.json_response({"error": str(error)}, status=503)
    return web.json_response({"digit": int(outputs["probabilities"].argmax())})


async def main() -> None:
    app = web.Application()
    app.cleanup_ctx.append(lifespan)
    app.router.add_post("/classify", classify)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]

    images, labels = digits_test()
    images = images / 16
    async with ClientSession(f"http://127.0.0.1:{port}") as client:

        async def ask(image: np.ndarray) -> int:
            async with client.post("/classify", json=image.reshape(-1).tolist()) as response:
                return int((await response.json())["digit"])

        answers = await asyncio.gather(*[ask(image) for image in images[:20]])
    print("answers", answers)
    print("truth  ", labels[:20].tolist())
    await runner.cleanup()


asyncio.run(main())
