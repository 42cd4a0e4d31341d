"""The one place that touches jax's settings: pinned while *we* trace and call, never the application's.

Many of jax's settings reach into whatever is traced or called on the same thread: 64-bit mode, promotion rules, the
transfer guard, `disable_jit`, the NaN checks, the default device. `pinned` sets each to what the meaning of an ONNX graph
needs, for this thread, and puts the application's back. It is entered in worker threads and inside `apply` only, never
around an `await`: another task of the same thread would see it.

`run_by_callers` is about jax's client for the CPU: what it is told when it is made, if it is made for us. jax has no other way
to say it than its configuration, which is as before when the client is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import jax

__all__ = ["inlined", "pinned", "run_by_callers"]

_ASYNC_DISPATCH = "jax_cpu_enable_async_dispatch"
_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})  # as jax reads its other variables


@contextmanager
def pinned(*, device: jax.Device | None = None, precision: str = "highest") -> Iterator[None]:
    """Pin jax's settings on this thread.

    Args:
        device: Where arrays made inside go; None leaves it to jax, not to the application's `jax.default_device`.
        precision: "highest": float32 products in full float32 on every platform. "platform": jax's own default.
    """
    with ExitStack() as stack:
        for setting in (
            jax.enable_x64(True),
            jax.default_matmul_precision("highest" if precision == "highest" else None),
            jax.numpy_dtype_promotion("strict"),
            jax.numpy_rank_promotion("allow"),
            jax.transfer_guard("allow"),
            jax.disable_jit(False),
            jax.debug_nans(False),
            jax.debug_infs(False),
            jax.check_tracer_leaks(False),
            jax.default_device(device),
            jax.default_prng_impl("threefry2x32"),
            jax.threefry_partitionable(True),
            jax.legacy_prng_key("allow"),
            jax.debug_key_reuse(False),
            jax.no_tracing(False),
        ):
            stack.enter_context(setting)
        yield


@contextmanager
def inlined(on: bool = True) -> Iterator[None]:
    """Trace jax's own functions into the program rather than as calls, within `pinned`.

    jax keeps the last 2048 traces of each of its functions (`jnp.where`, `jnp.take`, …), some 15 kB for each shape: traced as
    calls, every new shape would leave its share behind. XLA inlines the calls anyway.

    Args:
        on: Off for what loops: `lax.scan` and `lax.map` would be unrolled, too.
    """
    with jax.disable_jit(on):
        yield


@contextmanager
def run_by_callers() -> Iterator[None]:
    """A client of the CPU that is made in here runs programs in the thread that calls them, not in one of its own.

    Our callers have nothing else to do than to wait, and handing a program over costs 60 µs where cores have to be woken. Does
    nothing to a client that is there already, nor where `JAX_CPU_ENABLE_ASYNC_DISPATCH` is true in the environment: jax names
    its setting so, but reads only its configuration, where "on" can't be told from "not set".
    """
    configuration = cast("Any", jax.config)  # its methods have no types
    before = configuration.values.get(_ASYNC_DISPATCH)
    if before is None or os.environ.get(_ASYNC_DISPATCH.upper(), "").lower() in _TRUE:
        yield
        return
    configuration.update(_ASYNC_DISPATCH, False)
    try:
        yield
    finally:
        configuration.update(_ASYNC_DISPATCH, before)
