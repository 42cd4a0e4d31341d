"""If, Loop and Scan: subgraphs that run by a value, or many times.

Whatever is known on the host is decided while tracing: an If picks its branch, a Loop without a traced value in it runs
as a Python loop. The rest becomes `lax.cond`, `lax.scan` or `lax.while_loop` where shapes and dtypes stay the same, is
unrolled where the trips are few, and else ends the segment: the node then runs on the host with concrete values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from transmuter_async.graph import STRING
from transmuter_async.operators.context import Context, Subgraph
from transmuter_async.operators.iteration import (
    HOST_TRIPS,
    TRUE,
    UNFIT,
    Carry,
    Step,
    Trial,
    described,
    flag,
    give_up,
    holds_traced,
    no_rows,
    same_host,
    scan_trips,
    stack_rows,
    strong,
    traceable,
    try_trip,
    while_trips,
)
from transmuter_async.operators.layout import normal_axis
from transmuter_async.operators.registry import operator

__all__: list[str] = []

UNROLLED_SHAPES = 8
"""Trips that are unrolled at most when the carried shapes change from trip to trip."""

UNROLLED_NEEDS = 64
"""Trips that are unrolled at most when the body needs the trip's number, or another value, on the host."""


PROGRAM_TRIPS = 1 << 30
"""Trips that a loop whose body can't end it may make inside a program."""

_ENDLESS = "the loop has neither a trip count nor a condition that ends it"


# --- If ---------------------------------------------------------------------------------------------------------------


@operator("If", since_version=1, loops=True)
def if_1(cond: Any, /, *, else_branch: Subgraph, then_branch: Subgraph, context: Context) -> tuple[Any, ...]:
    """One of two subgraphs, which may differ in the shapes that they give.

    With a condition known on the host only that branch is looked at. With a traced one both become a `lax.cond` when
    they agree in structure, shapes and dtypes; outputs that both know on the host, equal, stay known. Else the
    condition is needed on the host.
    """
    if np.prod(cond.shape) != 1:
        raise ValueError(f"cond has shape {list(cond.shape)}, not that of one element")
    if not isinstance(cond, jax.Array):
        return (then_branch if flag(cond) else else_branch)()
    branches = [_tried(branch, context) for branch in (then_branch, else_branch)]
    known = None if None in branches else _branch_outputs(*[each.values for each in branches if each is not None])
    if known is None:
        value = context.needs(cond, 0, "the If condition")
        return (then_branch if flag(value) else else_branch)()
    bodies = [partial(each.dynamic, known) for each in branches if each is not None]
    results, alarm = lax.cond(flag(cond), *bodies)
    context.absorb(alarm)
    dynamic = iter(results)
    return tuple(value if is_known else next(dynamic) for is_known, value in known)


@dataclass(frozen=True, slots=True)
class _Tried:
    """A branch, traced once: it is not walked again, so that Ifs in Ifs in Ifs take the time of their nodes.

    Attributes:
        values: Its outputs: host values, and what the trace gave for the others.
        jaxpr: Computes the traced ones, and the alarm.
        structure: Of what `jaxpr` gives.
    """

    values: list[Any]
    jaxpr: Any
    structure: Any

    def dynamic(self, known: Sequence[tuple[bool, Any]]) -> tuple[list[Any], Any]:
        """What is not known on the host, and the alarm."""
        results, alarm = jax.tree.unflatten(self.structure, jaxpr_as_fun(self.jaxpr)())
        traced = [value if given is None else given for value, given in zip(self.values, results, strict=True)]
        return [strong(value) for value, (is_known, _) in zip(traced, known, strict=True) if not is_known], alarm


def _tried(branch: Subgraph, context: Context) -> _Tried | None:
    """The branch traced, None where a trace is not possible."""
    values: list[Any] = []

    def run() -> Any:
        values[:] = branch()
        return [value if holds_traced(value) else None for value in values]

    try:
        jaxpr, shapes = jax.make_jaxpr(context.carry(run), return_shape=True)()
    except UNFIT:
        return None
    return _Tried(values, jaxpr, jax.tree.structure(shapes))


def _branch_outputs(one: Sequence[Any], other: Sequence[Any]) -> list[tuple[bool, Any]] | None:
    """For each output whether both branches give one host value, and it; None when they do not fit a `lax.cond`."""
    outputs: list[tuple[bool, Any]] = []
    for a, b in zip(one, other, strict=True):
        if not holds_traced(a) and not holds_traced(b) and same_host(a, b):
            outputs.append((True, a))
            continue
        if not traceable(a) or not traceable(b) or described(a) != described(b):
            return None
        outputs.append((False, None))
    return outputs


# --- Loop -------------------------------------------------------------------------------------------------------------


@operator("Loop", since_version=1, loops=True)
def loop_1(M: Any = None, cond: Any = None, /, *v_initial: Any, body: Subgraph, context: Context) -> tuple[Any, ...]:
    """Run `body` while its condition holds, at most `M` times; its further outputs are stacked trip by trip.

    The result is the carried values after the last trip, then the stacked outputs. After no trips those are (0, …) with
    the shape that a trip would have given; onnxruntime makes dimensions that are not declared 0 as well. Carried
    sequences and optionals (versions 11, 13 and 16) live on the host, or in the unrolled form.
    """
    carried = list(v_initial) + [None] * (len(body.inputs) - 2 - len(v_initial))
    emits = len(body.outputs) - 1 - len(carried)
    if len(carried) != len(body.inputs) - 2 or emits < 0:
        raise ValueError(f"{len(v_initial)} carried values do not fit a body of {len(body.inputs)} inputs")

    def step(number: Any, values: list[Any], _: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        trip = number if isinstance(number, jax.Array) else np.asarray(number, np.int64)
        on, *rest = body(trip, TRUE, *values, iteration=number)
        return on, rest[: len(carried)], rest[len(carried) :]

    outputs = body.outputs[1 + len(carried) :]
    bound = _trip_bound(M)
    goes_on = True if cond is None else flag(cond)
    if bound is None and goes_on is True and body.never_stops():
        raise context.error(_ENDLESS)
    if goes_on is False or (isinstance(bound, int) and bound <= 0):
        host = not any(map(holds_traced, carried))
        return (*carried, *no_rows(step, carried, [], outputs, context, host=host))
    if isinstance(bound, jax.Array) or isinstance(goes_on, jax.Array):
        found = _loop_by_value(step, carried, bound, goes_on, emits, context)
        if found is not None:
            return found
        # `needs` gives a value where it may become part of the key, and ends the segment where it may not.
        known = (
            None if M is None else context.needs(M, 0, "the trip count of Loop"),
            None if cond is None else context.needs(cond, 1, "the condition of Loop"),
        )
        return loop_1(*known, *carried, body=body, context=context)
    return _loop_by_count(step, carried, bound, emits, body, context)


def _trip_bound(M: Any) -> Any:
    """The most trips: Python int, traced int64 scalar, or None."""
    if M is None:
        return None
    if math.prod(M.shape) != 1:
        raise ValueError(f"the trip count has shape {list(M.shape)}, not that of one element")
    return jnp.reshape(M, ()).astype(jnp.int64) if isinstance(M, jax.Array) else int(np.asarray(M).reshape(-1)[0])


def _loop_by_value(
    step: Step, carried: list[Any], bound: Any, goes_on: Any, emits: int, context: Context
) -> tuple[Any, ...] | None:
    """The number of trips is traced from the start: a `while_loop`, or None where its values are needed."""
    if emits == 0:
        trial = try_trip(step, carried, [], context)
        if isinstance(trial, Trial) and trial.invariant:
            if trial.goes_on and isinstance(bound, jax.Array):
                too_many = bound > PROGRAM_TRIPS
                context.refuse(too_many, f"the trip count is above {PROGRAM_TRIPS} and nothing else ends the loop")
                bound = jnp.where(too_many, 0, bound)
            return tuple(while_trips(step, Carry(carried, trial.kept), bound, goes_on, context))
    return None


def _loop_by_count(
    step: Step, carried: list[Any], bound: int | None, emits: int, body: Subgraph, context: Context
) -> tuple[Any, ...]:
    """At least one trip is made, and nothing but the body's own condition ends the trips early."""
    if any(map(holds_traced, carried)):
        found = _compiled_loop(step, carried, bound, emits, context)
        if found is not None:
            return found
    return _python_loop(step, carried, bound, emits, body, context)


def _compiled_loop(
    step: Step, carried: list[Any], bound: int | None, emits: int, context: Context
) -> tuple[Any, ...] | None:
    """The trips as one primitive, or None where a Python loop has to do."""
    trial = try_trip(step, carried, [], context)
    if not isinstance(trial, Trial):
        return None
    if trial.goes_on and bound is None:
        raise context.error(_ENDLESS)
    if not trial.invariant:
        if trial.goes_on and bound is not None and bound > UNROLLED_SHAPES and any(map(holds_traced, carried)):
            give_up(carried, _first_input(context, carried), f"to unroll {bound} trips of changing shapes", context)
        return None
    carry = Carry(carried, trial.kept)
    if trial.goes_on is None:
        return tuple(while_trips(step, carry, bound, True, context)) if emits == 0 else None
    trips = bound if trial.goes_on and bound is not None else 1
    if trips > PROGRAM_TRIPS:
        raise context.error(f"{trips} trips are above the limit of {PROGRAM_TRIPS}, and nothing else ends the loop")
    for shape, dtype in trial.emitted:
        context.budget((trips, *shape), dtype)
    after, stacked = scan_trips(step, carry, trips, [], context)
    return (*after, *stacked)


def _python_loop(
    step: Step, carried: list[Any], bound: int | None, emits: int, body: Subgraph, context: Context
) -> tuple[Any, ...]:
    """Trip by trip. Traced values that turn up from the graphs around the body are unrolled while they are few."""
    rows: list[list[Any]] = [[] for _ in range(emits)]
    values, number, unrolled = list(carried), 0, 0
    moving = any(map(holds_traced, carried))
    limit = UNROLLED_NEEDS
    while bound is None or number < bound:
        before = values
        on, values, emitted = step(number, values, [])
        if not moving and (holds_traced(on) or any(map(holds_traced, values)) or any(map(holds_traced, emitted))):
            # Only the body's own view of the graphs around it is traced: a primitive is the better form for it.
            moving = True
            if number == 0:
                found = _compiled_loop(step, carried, bound, emits, context)
                if found is not None:
                    return found
        for row, value in zip(rows, emitted, strict=True):
            row.append(value)
            context.budget((len(row), *value.shape), value.dtype)
        number += 1
        if on is TRUE and bound is None:
            raise context.error(_ENDLESS)
        if number >= HOST_TRIPS or (bound is not None and bound > HOST_TRIPS and body.never_stops()):
            raise context.error(f"the loop makes more than {HOST_TRIPS} trips on the host; its trip count is {bound}")
        if holds_traced(on):
            on = context.needs(on, _first_input(context, carried), "whether the Loop goes on")
        if not flag(on):
            break
        if moving:
            if _changed(before, values):
                limit = UNROLLED_SHAPES
            unrolled += 1
            if unrolled >= limit and (bound is None or number < bound):
                traced = [v for v in [*values, *emitted] if holds_traced(v)]
                give_up(traced or before, _first_input(context, carried), f"to unroll more than {limit} trips", context)
    return (*values, *[stack_rows(row) for row in rows])


def _changed(before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Whether carried values took another structure, shape or dtype."""
    return any(
        described(a) != described(b)
        for a, b in zip(before, after, strict=True)
        if (holds_traced(a) or holds_traced(b)) and traceable(a) and traceable(b)
    )


def _first_input(context: Context, carried: Sequence[Any]) -> int:
    """The input that stands for what is traced in a loop, for the text of a break."""
    first = next((i for i, value in enumerate(carried) if holds_traced(value)), None)
    if first is not None:
        return first + 2
    return next((i for i, name in enumerate(context.node.inputs) if name), 0)


# --- Scan -------------------------------------------------------------------------------------------------------------


@operator("Scan", since_version=8, static=("sequence_lens",), loops=True)
def scan_8(
    sequence_lens: Any = None,
    /,
    *initial_state_and_scan_inputs: Any,
    body: Subgraph,
    directions: Sequence[int] | None = None,
    num_scan_inputs: int,
    context: Context,
) -> tuple[Any, ...]:
    """Scan over each sequence of a batch: axis 0 is the batch, axis 1 of the scan inputs the sequence.

    Outputs past `sequence_lens[b]` are zero. A backward direction starts at the sequence's own last step.
    """
    states = len(initial_state_and_scan_inputs) - num_scan_inputs
    values, inputs = initial_state_and_scan_inputs[:states], initial_state_and_scan_inputs[states:]
    if not inputs:
        raise ValueError("Scan has no scan inputs")
    batch, longest = inputs[0].shape[:2]
    lens = [longest] * batch if sequence_lens is None else np.asarray(sequence_lens).reshape(-1).tolist()
    if len(lens) != batch or any(not 0 <= n <= longest for n in lens):
        raise ValueError(f"sequence_lens {lens} are not {batch} lengths within [0, {longest}]")
    if batch == 0:
        return _empty_batch(values, inputs, longest, body, context)
    rows = []
    for item, count in enumerate(lens):
        results = _scanned(
            [value[item] for value in values],
            [value[item, :count] for value in inputs],
            body,
            [0] * num_scan_inputs,
            list(directions or [0] * num_scan_inputs),
            context,
        )
        module = jnp if any(map(holds_traced, results)) else np
        tails = [
            module.concatenate([out, module.zeros((longest - count, *out.shape[1:]), out.dtype)])
            if count < longest
            else out
            for out in results[states:]
        ]
        rows.append([*results[:states], *tails])
    return tuple(stack_rows(column) for column in zip(*rows, strict=True))


def _empty_batch(
    values: Sequence[Any], inputs: Sequence[Any], longest: int, body: Subgraph, context: Context
) -> tuple[Any, ...]:
    """Scan-8 over no sequences: states as they are, outputs (0, longest, …)."""

    def step(number: Any, states: list[Any], slices: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        results = body(*states, *slices, iteration=number)
        return TRUE, list(results[: len(values)]), list(results[len(values) :])

    host = not any(map(holds_traced, [*values, *inputs]))
    module = np if host else jnp
    states = [module.zeros(value.shape[1:], value.dtype) for value in values]
    slices = [jax.ShapeDtypeStruct(value.shape[2:], value.dtype) for value in inputs]
    found = no_rows(step, states, slices, body.outputs[len(values) :], context, host=host)
    return (*values, *[module.zeros((0, longest, *out.shape[1:]), out.dtype) for out in found])


@operator("Scan", since_version=9, loops=True)
def scan_9(
    *initial_state_and_scan_inputs: Any,
    body: Subgraph,
    num_scan_inputs: int,
    scan_input_axes: Sequence[int] | None = None,
    scan_input_directions: Sequence[int] | None = None,
    scan_output_axes: Sequence[int] | None = None,
    scan_output_directions: Sequence[int] | None = None,
    context: Context,
) -> tuple[Any, ...]:
    """Run `body` over the slices of the scan inputs, carrying state; its further outputs are stacked.

    Directions: 1 runs an input from its end, or prepends the slices of an output.
    """
    states = len(initial_state_and_scan_inputs) - num_scan_inputs
    values, inputs = initial_state_and_scan_inputs[:states], initial_state_and_scan_inputs[states:]
    emits = len(body.outputs) - states
    results = _scanned(
        list(values),
        list(inputs),
        body,
        list(scan_input_axes or [0] * num_scan_inputs),
        list(scan_input_directions or [0] * num_scan_inputs),
        context,
    )
    axes = list(scan_output_axes or [0] * emits)
    backwards = list(scan_output_directions or [0] * emits)
    stacked = []
    for out, axis, backward in zip(results[states:], axes, backwards, strict=True):
        module = jnp if holds_traced(out) else np
        turned = module.flip(out, 0) if backward else out
        stacked.append(module.moveaxis(turned, 0, normal_axis(axis, out.ndim)))
    return (*results[:states], *stacked)


def _scanned(
    carried: list[Any],
    inputs: list[Any],
    body: Subgraph,
    axes: Sequence[int],
    directions: Sequence[int],
    context: Context,
) -> list[Any]:
    """Final state, then each output stacked on axis 0 in the order of the trips."""
    if not inputs or len(axes) != len(inputs) or len(directions) != len(inputs):
        raise ValueError(f"{len(inputs)} scan inputs do not fit axes {list(axes)} and directions {list(directions)}")
    moved = []
    for value, axis, backward in zip(inputs, axes, directions, strict=True):
        module = jnp if holds_traced(value) else np
        first = module.moveaxis(value, normal_axis(axis, value.ndim), 0)
        moved.append(module.flip(first, 0) if backward else first)
    lengths = {value.shape[0] for value in moved}
    if len(lengths) > 1:
        raise ValueError(f"the scan inputs differ in length: {sorted(lengths)}")
    trips = lengths.pop()

    def step(number: Any, values: list[Any], slices: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        results = body(*values, *slices, iteration=number)
        return TRUE, list(results[: len(values)]), list(results[len(values) :])

    slices = [jax.ShapeDtypeStruct(value.shape[1:], value.dtype) for value in moved if value.dtype != STRING]
    moving = any(map(holds_traced, [*carried, *moved]))
    if trips == 0 or moving:
        trial = try_trip(step, carried, slices, context) if len(slices) == len(moved) else None
        if moving and isinstance(trial, Trial) and trial.invariant:
            for shape, dtype in trial.emitted:
                context.budget((trips, *shape), dtype)
            after, stacked = scan_trips(step, Carry(carried, trial.kept), trips, moved, context)
            return [*after, *stacked]
        if trips == 0:
            outputs = body.outputs[len(carried) :]
            return [*carried, *no_rows(step, carried, slices, outputs, context, host=not moving)]
        if trips > UNROLLED_SHAPES:
            index = next(i for i, v in enumerate([*carried, *inputs]) if holds_traced(v))
            give_up([*carried, *moved], index, f"to unroll more than {UNROLLED_SHAPES} trips", context)
    return _python_scan(step, carried, moved, slices, trips, len(body.outputs) - len(carried), moving, context)


def _python_scan(
    step: Step,
    carried: list[Any],
    moved: list[Any],
    slices: list[Any],
    trips: int,
    emits: int,
    moving: bool,
    context: Context,
) -> list[Any]:
    rows: list[list[Any]] = [[] for _ in range(emits)]
    values = list(carried)
    for number in range(trips):
        _, values, emitted = step(
            number, values, [np.asarray(v[number]) if not holds_traced(v) else v[number] for v in moved]
        )
        if number == 0 and not moving and any(map(holds_traced, [*values, *emitted])):
            trial = try_trip(step, carried, slices, context) if len(slices) == len(moved) else None
            if isinstance(trial, Trial) and trial.invariant:
                after, stacked = scan_trips(step, Carry(carried, trial.kept), trips, moved, context)
                return [*after, *stacked]
            if trips > UNROLLED_NEEDS:
                give_up([*values, *emitted], 0, f"to unroll more than {UNROLLED_NEEDS} trips", context)
        for row, value in zip(rows, emitted, strict=True):
            row.append(value)
            context.budget((len(row), *value.shape), value.dtype)
    return [*values, *[stack_rows(row) for row in rows]]
