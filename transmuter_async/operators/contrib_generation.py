"""The loop of text generation: step by step on the host, or unrolled in a program.

The caches of a decoder grow with each step, so that no step has the shapes of another: a program holds them one after
the other. A step that comes when every answer has ended is not computed (`lax.cond`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from transmuter_async.errors import NeedsValue
from transmuter_async.graph import Value
from transmuter_async.operators.context import Context, Subgraph
from transmuter_async.operators.contrib_choices import Beams, Draws, Greedy
from transmuter_async.operators.contrib_decoders import Cache, Call, Decoder, EncoderDecoder, Reader
from transmuter_async.operators.iteration import UNFIT, described, give_up, holds_traced, strong
from transmuter_async.operators.registry import xp

__all__ = ["UNROLLED_OPERATIONS", "Outside", "Search", "State", "conversation", "generate"]

UNROLLED_OPERATIONS = 10_000
"""JAX operations that the steps of one program may have together.

XLA's CPU compiler takes 2.5 ms of processor time for each (measured, from 600 to 3600 of them): 25 s in all. Above it the
decoder has a program for each length of its past, which prompts of other lengths share.
"""


@dataclass(frozen=True, slots=True)
class Outside:
    """A subgraph that somebody else runs: see `conversation`."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


class State(NamedTuple):
    """What goes from one step to the next.

    Attributes:
        sequences: `(rows, tokens)` int32 so far.
        tokens: `(rows, new)` int32, what the next step is fed.
        cache: The decoder's.
        own: The chooser's.
        done: `(batch,)` bool.
    """

    sequences: Any
    tokens: Any
    cache: Cache
    own: Any
    done: Any


@dataclass(frozen=True, slots=True)
class Search:
    """A search that has not begun.

    Attributes:
        reader: What it starts from.
        chooser: How it goes on.
        longest: Tokens of each answer, padding included.
        result: The operator's outputs, from the last state and the scores shown by each step.
    """

    reader: Reader
    chooser: Greedy | Draws | Beams
    longest: int
    result: Callable[[State, Sequence[Any]], tuple[Any, ...]]
    context: Context

    @property
    def steps(self) -> int:
        """How many tokens are added at most."""
        begin = self.reader.prompt.shape[1]
        if self.longest < begin:
            raise ValueError(f"max_length is {self.longest}, but the prompt has {begin} tokens already")
        return self.longest - begin

    def begin(self, model: Decoder) -> State:
        """Before the first step."""
        sequences = self.reader.sequences()
        rows = sequences.shape[0]
        done = np.zeros(rows // self.reader.copies, bool)
        return State(sequences, sequences, model.begin(rows), self.chooser.begin(rows), done)

    def step(self, model: Decoder, state: State, outputs: Sequence[Any], number: int) -> tuple[State, Any]:
        """The state after a step, given what the decoder gave, and the scores to show."""
        logits, cache = model.take(state.cache, outputs, state.sequences.shape[0])
        tokens, rows, own, done, shown = self.chooser.choose(
            state.own, logits, state.sequences, state.done, number, self.context
        )
        sequences = state.sequences
        if rows is not None:
            cache = model.reorder(cache, rows)
            sequences = xp(sequences, rows).take(sequences, rows, axis=0, mode="clip")
        tokens = tokens[:, None]
        sequences = xp(sequences, tokens).concatenate([sequences, tokens], axis=1)
        return State(sequences, tokens, cache, own, done), shown


def conversation(search: Search) -> Generator[Call, Sequence[Any], tuple[Any, ...]]:
    """The search on the host, for somebody else who runs the subgraphs: takes host values, returns the outputs."""
    call = search.reader.call()
    model = search.reader.model((yield call) if call is not None else ())
    state, shown = search.begin(model), []
    for number in range(search.steps):
        if number and state.done.all():
            break
        call = model.call(state.cache, state.tokens, state.sequences, number)
        outputs = (yield call) if call is not None else ()
        state, scores = search.step(model, state, outputs, number)
        shown.append(scores)
    return search.result(state, shown)


def generate(search: Search) -> tuple[Any, ...]:
    """The outputs of the search: on the host where all is known, else as part of a program, unrolled."""
    bodies, context = search.reader.bodies, search.context
    call = search.reader.call()
    model = search.reader.model(() if call is None else _run(bodies, call))
    state, shown = search.begin(model), []
    counted = False

    def step(state: State, number: int) -> tuple[State, Any]:
        call = model.call(state.cache, state.tokens, state.sequences, number)
        return search.step(model, state, () if call is None else _run(bodies, call), number)

    for number in range(search.steps):
        if number and not holds_traced(state.done) and state.done.all():
            break
        if not holds_traced((state, _arrays(model))):
            state, scores = step(state, number)
            shown.append(scores)
            continue
        traced = _traced(partial(step, state, number), context)
        if isinstance(traced, Exception):
            reason = traced.reason if isinstance(traced, NeedsValue) else f"to run the decoder step by step ({traced})"
            give_up([state, _arrays(model)], 0, reason, context)
        if not counted:
            counted = True
            total = _operations(traced.jaxpr.jaxpr) * (search.steps - number)
            if total > UNROLLED_OPERATIONS:
                reason = (
                    f"to unroll {search.steps - number} steps of a decoder: they have about {total} operations "
                    f"together, and a program may have {UNROLLED_OPERATIONS}"
                )
                give_up([state, _arrays(model)], 0, reason, context)
        if holds_traced(state.done):
            (state, scores), alarm = lax.cond(jnp.all(state.done), partial(_skip, state, traced, search), traced.run)
        else:
            (state, scores), alarm = traced.run()
        context.absorb(alarm)
        shown.append(scores)
    return search.result(state, shown)


def _run(bodies: dict[str, Subgraph | None], call: Call) -> tuple[Any, ...]:
    body = bodies[call.attribute]
    assert body is not None
    return body(*call.inputs, iteration=call.iteration)


def _arrays(model: Decoder) -> list[Any]:
    """What a decoder takes at every step."""
    return [*model.fixed, *model.cross, model.logits] if isinstance(model, EncoderDecoder) else []


@dataclass(frozen=True, slots=True)
class _Traced:
    """A step, traced once: its program, and what it gives."""

    jaxpr: Any
    shapes: Any

    def run(self) -> Any:
        """The state, the scores to show, and the alarm."""
        return jax.tree.unflatten(jax.tree.structure(self.shapes), jaxpr_as_fun(self.jaxpr)())


def _traced(step: Callable[[], Any], context: Context) -> _Traced | Exception:
    def run() -> Any:
        return strong(step())

    try:
        return _Traced(*jax.make_jaxpr(context.carry(run), return_shape=True)())
    except UNFIT as error:
        return error


def _skip(state: State, traced: _Traced, search: Search) -> Any:
    """What a step gives that need not be computed: padding. Nothing reads the caches any more."""
    (shapes, shown), _ = traced.shapes

    def kept(old: Any, new: Any) -> Any:
        return strong(old) if described(old) == described(new) else jnp.zeros(new.shape, new.dtype)

    after = jax.tree.map(kept, state, shapes)
    pad = search.chooser.rules.pad
    added = shapes.sequences.shape[1] - state.sequences.shape[1]
    sequences = jnp.pad(strong(state.sequences), ((0, 0), (0, added)), constant_values=np.int32(pad))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shown)
    return (after._replace(sequences=sequences), zeros), jnp.int32(0)


def _operations(jaxpr: Jaxpr) -> int:
    """Operations of a program, those inside of others included."""
    total = 0
    for equation in jaxpr.eqns:
        total += 1
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = value.jaxpr if isinstance(value, ClosedJaxpr) else value
            if isinstance(inner, Jaxpr):
                total += _operations(inner)
    return total
