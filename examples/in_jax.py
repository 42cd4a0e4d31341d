"""A model as a pure function: under `jax.jit`, `jax.vmap` and `jax.grad`.

python examples/in_jax.py
"""

from __future__ import annotations

import anyio
import jax
import jax.numpy as jnp
import numpy as np

import transmuter_async as tm
from transmuter_async.demo import digits_model, digits_test


async def load() -> tm.Model:
    async with tm.Runtime() as runtime:
        return await runtime.load(digits_model())


apply, params = tm.to_jax(anyio.run(load))
images, labels = digits_test()
batch = images[:32, None].astype(np.float32) / 16


def loss(params, image, label):
    """Cross entropy of the graph's own probabilities."""
    probabilities = apply(params, {"image": image})["probabilities"]
    return -jnp.log(probabilities[jnp.arange(len(label)), label]).mean()


value, gradient = jax.jit(jax.value_and_grad(loss))(params, batch, labels[:32].astype(np.int32))
print(f"loss {float(value):.4f}; largest gradient {max(float(jnp.abs(g).max()) for g in gradient.values()):.4f}")

one_by_one = jax.vmap(lambda image: apply(params, {"image": image[None]})["probabilities"][0])(batch)
print("vmap agrees:", bool(jnp.allclose(one_by_one, apply(params, {"image": batch})["probabilities"], atol=1e-6)))
