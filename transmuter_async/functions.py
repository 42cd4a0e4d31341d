"""Doors that need no runtime and no event loop: plain functions on models and arrays."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, BinaryIO

import jax

from transmuter_async import compiler, operators
from transmuter_async.bridge import current_loop_or_none
from transmuter_async.compiler import Finished, Options, SegmentCache, pinned, prepare, unobserved
from transmuter_async.errors import MisuseError
from transmuter_async.graph import Model
from transmuter_async.sources import is_repository, kept_small, read_local
from transmuter_async.telemetry import Telemetry

if TYPE_CHECKING:
    import onnx  # for the annotation only: protobuf is the reader's business

__all__ = ["device_put", "run_sync", "supported_operators", "to_jax"]


def run_sync(
    model: Model | str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO | onnx.ModelProto,
    inputs: Mapping[str, Any],
    *,
    seed: int | None = None,
    device: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Answer one call without an event loop: reads, compiles and runs in this thread, and keeps nothing.

    For scripts and notebooks. It compiles anew each time; what is called often wants a `Runtime`.

    Args:
        model: A `Model`, or a local source as `Runtime.load` takes it.
        inputs: As for `Compiled.run`.
        seed: Of random operators; a fresh one for each call by default.
        device: Give JAX arrays instead of numpy ones.
        options: `outputs`, `static_inputs`, `compiler`, `bounds`, `nonfinite`, `precision`, `float16`, `breaks`, as for
            `Runtime.compile`.

    Returns:
        Read-only arrays by output name, in the graph's order, of the graph's dtypes.

    Raises:
        MisuseError: This thread runs an event loop, which would be blocked; or the source is on the Hub.
        TransmuterError: As `Runtime.load` and `Compiled.run`.
    """
    if current_loop_or_none() is not None:
        raise MisuseError(
            "run_sync would block the event loop that runs in this thread; use `async with Runtime()` here"
        )
    if not isinstance(model, Model):
        if isinstance(model, str) and is_repository(model):
            raise MisuseError(f"run_sync reads local files only; load {model!r} in a Runtime")
        model = read_local(model)
    overrides = tuple(name for name in inputs if name in model.graph.overridable)
    prepared = prepare(model, Options(overrides=overrides, optimize=model.optimize, **{**kept_small(model), **options}))
    cache = SegmentCache(prepared.options.cache_size)
    if seed is None:
        seed = secrets.randbits(64)
    execution = prepared.start(prepared.take_inputs(inputs), seed=seed, device=device)
    with pinned(device=prepared.device, precision=prepared.options.precision):
        while True:
            step = execution.advance(cache, unobserved)
            if isinstance(step, Finished):
                return step.outputs
            cache.put(step.job.run(unobserved), unobserved)


def to_jax(
    model: Model,
    *,
    bounds: str = "clamp",
    static_inputs: Mapping[str, Any] | None = None,
    telemetry: Telemetry | None = None,
) -> tuple[Callable[..., dict[str, Any]], dict[str, jax.Array]]:
    """A model as a pure function for `jax.jit`, `jax.vmap` and `jax.grad`: `outputs = apply(params, inputs, seed=None)`.

    Args:
        model: From `Runtime.load`.
        bounds: What an out-of-range index gives: "clamp" the nearest element, "nan" NaN (integers: the dtype's minimum). A
            pure function can't raise.
        static_inputs: Values of inputs that the graph reads on the host; they are left out of `inputs`.
        telemetry: A bus that is told `transmuter.run` whenever the graph is run or traced. Inside of `jax.jit` that is when
            jax traces it; a cached program tells nothing.

    Returns:
        `(apply, params)`. `params` holds the floating-point weights by name, those of branches and loop bodies included.
        `apply` takes `inputs` by name, of the declared ranks and fixed dimensions, and gives JAX arrays by output name, of
        the graph's dtypes. `seed` is an integer, a threefry key or (2,) uint32, for random operators; None is 0, since a pure
        function has no fresh one.

    Raises:
        UnsupportedModel: Operators are missing.
        InputError: `static_inputs` names something that is no input, or does not fit it.
        TypeError: `model` is no `Model`.
        ValueError: `bounds` is neither.

    `apply` raises `InputError` for inputs or params that do not fit, and `NeedsValue` where the graph breaks.

    64-bit integers and floats are exact whatever `jax_enable_x64` says, and 32-bit arrays are taken where the graph says
    64. One thing can't be made safe here: with x64 off, `jax.jit(apply)` gets numpy int64 values only after jax has wrapped
    them to 32 bits, so ids above 2**31 are lost before `apply` sees them. Make them true 64-bit arrays with
    `device_put(inputs)` first.
    """
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    if telemetry is not None:
        bus, facts = telemetry, {"source": model.source}

        def around() -> AbstractContextManager[Any]:
            return bus.span("transmuter.run", facts)

    return compiler.to_jax(model, bounds=bounds, static_inputs=static_inputs, around=around)


def device_put(inputs: Any, device: jax.Device | None = None) -> Any:
    """Put arrays (or a tree of them) on a device with their dtypes as they are: 64-bit ones stay 64-bit, whatever x64 says.

    Args:
        inputs: Arrays or numbers of any shape and of any dtype that JAX has, or a tree of them (a dict of inputs).
        device: Where to; None is jax's default.

    Returns:
        The same tree of `jax.Array`, of the same shapes and dtypes.

    Raises:
        TypeError: A dtype that JAX does not have, such as strings.
    """
    with pinned(device=device):
        return jax.device_put(inputs, device)


def supported_operators() -> dict[str, dict[str, tuple[int, ...]]]:
    """Every operator that has a definition: domain, name, and the versions at which its definition changes."""
    found: dict[str, dict[str, list[int]]] = {}
    for definition in operators.supported():
        found.setdefault(definition.domain or "ai.onnx", {}).setdefault(definition.name, []).append(
            definition.since_version
        )
    return {
        domain: {name: tuple(sorted(each)) for name, each in sorted(names.items())}
        for domain, names in sorted(found.items())
    }
