"""What If, Loop and Scan share: bodies tried without data, and trips as JAX primitives.

A *trip* is one run of a loop's body: `(number, carried values, this trip's inputs)` in, `(goes on, carried values, this
trip's outputs)` out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter_async.errors import TransmuterError
from transmuter_async.graph import STRING, TensorType, Value
from transmuter_async.operators.context import Context, first_alarm

__all__ = [
    "HOST_TRIPS",
    "TRUE",
    "UNFIT",
    "Carry",
    "Step",
    "Trial",
    "described",
    "flag",
    "give_up",
    "holds_traced",
    "no_rows",
    "same_host",
    "scan_trips",
    "stack_rows",
    "strong",
    "traceable",
    "try_trip",
    "while_trips",
]

# What an attempt to trace a body may end with, when it is not fit for a JAX primitive. The next form, or the host, says
# what is really wrong, if anything is: a branch that is not taken, or a loop without trips, may well make no sense.
UNFIT = (TransmuterError, ArithmeticError, LookupError, NotImplementedError, TypeError, ValueError)

TRUE = np.asarray(True)
"""The condition that goes into every trip: it is only made while the condition holds."""

HOST_TRIPS = 1 << 22
"""Trips that a loop may make on the host. A count may come from a stranger's file: at 10 µs a trip this is a minute."""

Step = Callable[[Any, list[Any], list[Any]], tuple[Any, list[Any], list[Any]]]


# --- values ---------------------------------------------------------------------------------------------------------


def _is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def holds_traced(value: Any) -> bool:
    """Whether a value, or anything in it, is a JAX value."""
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))


def strong(value: Any) -> Any:
    """A tensor, or a sequence of them, as JAX values that own their dtype."""
    return jax.tree.map(lambda leaf: lax.convert_element_type(jnp.asarray(leaf), leaf.dtype), value)


def described(value: Any) -> Any:
    """Structure, shapes and dtypes, comparable."""
    leaves, structure = jax.tree.flatten(value)
    return structure, tuple((tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves)


def same_host(a: Any, b: Any) -> bool:
    """Whether two values are one and the same, or equal host values of one dtype and shape."""
    if a is b:
        return True
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same_host, a, b))
    if not isinstance(a, (np.ndarray, np.generic)) or not isinstance(b, (np.ndarray, np.generic)):
        return False
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and (a.dtype == STRING or a.tobytes() == b.tobytes())
        and bool(a.dtype != STRING or np.all(a == b))
    )


def flag(value: Any) -> Any:
    """A condition as a scalar: Python bool on the host, traced bool else. Any shape of one element is accepted."""
    shape = np.shape(value)
    if math.prod(shape) != 1:
        raise ValueError(f"a condition has shape {list(shape)}, not that of one element")
    if isinstance(value, jax.Array):
        return jnp.reshape(value, ()).astype(jnp.bool_)
    return bool(np.asarray(value).reshape(-1)[0])


def traceable(value: Any) -> bool:
    """Whether a value can go through a JAX primitive: tensors that are no strings, and sequences of such."""
    leaves = jax.tree.leaves(value, is_leaf=lambda leaf: leaf is None)
    return all(_is_array(leaf) and leaf.dtype != STRING for leaf in leaves)


# --- trips ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trial:
    """What a trial trip told: which carried values stay known, and whether and how trips go on."""

    kept: frozenset[int]
    goes_on: bool | None
    invariant: bool
    emitted: tuple[tuple[tuple[int, ...], np.dtype], ...]


def try_trip(step: Step, carried: Sequence[Any], slices: Sequence[Any], context: Context) -> Trial | Exception:
    """Trace one trip without data, or the exception that this ended with.

    A carried host value that the body hands on unchanged stays known in every trip: the trial takes everything else as
    traced, so nothing that changes can have led to it.

    `slices` are the abstract inputs of one trip.
    """
    if jax.dtypes.canonicalize_dtype(np.int64) != np.int64:
        return RuntimeError("this thread traces without 64-bit types")  # on the host form, outside of a run
    kept = frozenset(i for i, value in enumerate(carried) if not holds_traced(value))
    while True:
        raw: list[Any] = []

        def run(
            number: Any, moving: list[Any], inputs: list[Any], kept: frozenset[int] = kept, raw: list[Any] = raw
        ) -> Any:
            flowing = iter(moving)
            values = [value if i in kept else next(flowing) for i, value in enumerate(carried)]
            raw[:] = step(number, values, inputs)
            return jax.tree.map(lambda leaf: leaf if holds_traced(leaf) else None, raw[1:])

        moving = [value for i, value in enumerate(carried) if i not in kept]
        if not all(map(traceable, moving)):
            return TypeError("a carried value is no tensor that a program can hold")
        try:
            jax.eval_shape(context.carry(run), jax.ShapeDtypeStruct((), np.int64), moving, list(slices))
        except UNFIT as error:
            return error
        goes_on, after, emitted = raw
        still = frozenset(i for i in kept if not holds_traced(after[i]) and same_host(carried[i], after[i]))
        if still == kept:
            break
        kept = still
    if not all(map(traceable, emitted)) or not all(traceable(after[i]) for i in range(len(after)) if i not in kept):
        return TypeError("a result of the body is no tensor that a program can hold")
    return Trial(
        kept=kept,
        goes_on=None if holds_traced(goes_on) else bool(flag(goes_on)),
        invariant=all(described(carried[i]) == described(after[i]) for i in range(len(after)) if i not in kept),
        emitted=tuple((tuple(value.shape), np.dtype(value.dtype)) for value in emitted),
    )


class Carry:
    """Splits carried values into those that stay known and those that flow through the primitive."""

    def __init__(self, carried: Sequence[Any], kept: frozenset[int]) -> None:
        self.carried = carried
        self.kept = kept

    def flowing(self, values: Sequence[Any]) -> list[Any]:
        """Of carried values, those that change, as JAX values."""
        return [strong(value) for i, value in enumerate(values) if i not in self.kept]

    def whole(self, flowing: Sequence[Any]) -> list[Any]:
        """All carried values, from those that change."""
        rest = iter(flowing)
        return [value if i in self.kept else next(rest) for i, value in enumerate(self.carried)]


def scan_trips(
    step: Step, carry: Carry, trips: int, inputs: Sequence[Any], context: Context
) -> tuple[list[Any], list[Any]]:
    """`trips` trips as `lax.scan`: carried values, and each output stacked on a first axis."""

    def body(state: tuple[Any, list[Any], Any], parts: list[Any]) -> Any:
        number, flowing, before = state

        def trip() -> tuple[list[Any], list[Any]]:
            _, after, emitted = step(number, carry.whole(flowing), parts)
            return carry.flowing(after), [strong(value) for value in emitted]

        (after, emitted), alarm = context.carry(trip)()
        return (number + 1, after, first_alarm(before, alarm)), emitted

    # The trip's number is counted: an array of all of them would take memory for nothing.
    start = (jnp.int64(0), carry.flowing(carry.carried), jnp.int32(0))
    (_, flowing, alarm), stacked = lax.scan(body, start, [jnp.asarray(value) for value in inputs], length=trips)
    context.absorb(alarm)
    return carry.whole(flowing), stacked


def while_trips(step: Step, carry: Carry, bound: Any, goes_on: Any, context: Context) -> list[Any]:
    """Trips while the condition holds and `bound` (None: no bound) is not reached, as `lax.while_loop`."""

    def running(state: Any) -> Any:
        number, on, _, _ = state
        return on if bound is None else on & (number < bound)

    def body(state: Any) -> Any:
        number, _, flowing, alarm = state

        def trip() -> tuple[Any, list[Any]]:
            on, after, _ = step(number, carry.whole(flowing), [])
            return jnp.asarray(flag(on)), carry.flowing(after)

        (on, after), new = context.carry(trip)()
        return number + 1, on, after, first_alarm(alarm, new)

    start = (jnp.int64(0), jnp.asarray(flag(goes_on)), carry.flowing(carry.carried), jnp.int32(0))
    _, _, flowing, alarm = lax.while_loop(running, body, start)
    context.absorb(alarm)
    return carry.whole(flowing)


def stack_rows(rows: Sequence[Any], axis: int = 0) -> Any:
    """Outputs of the trips of a Python loop on a new axis."""
    shapes = {tuple(row.shape) for row in rows}
    if len(shapes) > 1:
        raise ValueError(f"the body's outputs differ in shape from trip to trip: {sorted(shapes)}")
    if not any(map(holds_traced, rows)):
        return np.stack(rows, axis)
    dtype = rows[0].dtype
    if dtype.name in ("int2", "uint2"):  # XLA's CPU compiler cannot concatenate those
        return jnp.stack([jnp.asarray(row).astype(jnp.int8) for row in rows], axis).astype(dtype)
    return jnp.stack(rows, axis)


def no_rows(
    step: Step, carried: Sequence[Any], slices: Sequence[Any], outputs: Sequence[Value], context: Context, *, host: bool
) -> list[Any]:
    """The stacked outputs of no trips: (0, …) with the shape and dtype that one trip would give.

    A trip is traced without data. Where that cannot be, the declared types decide, unknown dimensions being 0.
    """
    if not outputs:
        return []
    trial = try_trip(step, carried, slices, context)
    shapes: list[tuple[tuple[int, ...], np.dtype]] = []
    if isinstance(trial, Trial):
        shapes += trial.emitted
    else:
        for output in outputs:
            declared = output.type
            if not isinstance(declared, TensorType) or declared.dtype is None or declared.shape is None:
                raise context.error(
                    f"no trip was made, and the shape of {output.name!r} is neither declared nor found: {trial}"
                ) from trial
            shapes.append((tuple(d if isinstance(d, int) else 0 for d in declared.shape), declared.dtype))
    # A known result stays known: it has no elements.
    return [
        np.zeros((0, *shape), dtype) if host or dtype == STRING else jnp.zeros((0, *shape), dtype)
        for shape, dtype in shapes
    ]


def give_up(values: Sequence[Any], index: int, reason: str, context: Context) -> NoReturn:
    """Raise `NeedsValue` over what is traced in `values`: on the host the node just runs."""
    leaf = next(leaf for leaf in jax.tree.leaves(list(values)) if isinstance(leaf, jax.Array))
    # A value of its own, which no static argument can stand for: knowing it would not make the trips fewer.
    context.needs(jnp.expand_dims(leaf, 0), index, reason)
    raise context.error(f"it would take {reason}")
