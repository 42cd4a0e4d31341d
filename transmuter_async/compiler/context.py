"""What a definition may ask of the node that it computes: bounds, random keys, alarms, budgets, values on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from transmuter_async.compiler.alarms import Alarm, out_of_range
from transmuter_async.compiler.flow import nodes_between
from transmuter_async.compiler.needs import known_value
from transmuter_async.compiler.run import FOLD_BYTES, LIFT_BYTES, MAX_ELEMENTS, Run, Scope, has_traced
from transmuter_async.errors import OperatorError
from transmuter_async.graph import Node
from transmuter_async.operators import HALF, RECIPES, Operator, fold_in

__all__ = ["NodeContext", "TooLargeToFold", "Walk"]

_WIDE = {name.removeprefix("wide "): name for name in RECIPES if name.startswith("wide ")}

Walk = Callable[[Run, Sequence[Node], Scope], None]
"""Runs nodes in order; their outputs land in the scope."""


class TooLargeToFold(Exception):
    """A known result is above the folding budget: compute it in the program instead."""


class NodeContext:
    """The `operators.Context` of one node in one run."""

    __slots__ = ("definition", "folding", "node", "opset", "platform", "run", "scope", "walk", "wide")

    def __init__(self, run: Run, node: Node, definition: Operator, scope: Scope, *, folding: bool, walk: Walk) -> None:
        self.run = run
        self.scope = scope
        self.node = node
        self.definition = definition
        self.opset = node.opset
        self.platform = run.platform
        self.folding = folding
        self.walk = walk
        self.wide = False

    def lowers(self, name: str) -> bool:
        """See `operators.Context.lowers`."""
        if name not in self.run.lowerings:
            return False
        self.run.taken[self.node.name, self.node.operator, name] = None
        return True

    def prepared(self, weight: Any, recipe: str, *arguments: float) -> Any:
        """See `operators.Context.prepared`."""
        weights = weight if isinstance(weight, tuple) else (weight,)
        run = self.run
        if self.wide and any(each is not None and each.dtype == HALF for each in weights):
            recipe = _WIDE.get(recipe, recipe)  # the others widen by themselves
        if not any(isinstance(each, jax.Array) for each in weights):
            made = run.prepare(weights, recipe, arguments)
            if made is not None:
                return self._argument(made)
        return RECIPES[recipe](*map(self._argument, weights), *arguments)

    def _argument(self, weight: Any) -> Any:
        """A known array as the argument of a program, where it is large and there is one."""
        known = isinstance(weight, np.ndarray) and self.run.tracing
        return self.run.lift(weight) if known and weight.nbytes > LIFT_BYTES else weight

    def bounded(
        self, indices: Any, size: Any, *, input: str, axis: int | None, inclusive: bool = False
    ) -> tuple[Any, Any]:
        """See `operators.Context.bounded`."""
        run = self.run
        top = size + 1 if inclusive else size
        if not isinstance(indices, jax.Array):
            indices = np.asarray(indices)
            if indices.dtype == np.uint64:
                indices = np.minimum(indices, np.uint64(2**63 - 1))
            indices = indices.astype(np.int64)
            normal = np.where(indices < 0, indices + size, indices)
            valid = (normal >= 0) & (normal < top)
            if not valid.all():
                if run.bounds == "check":
                    worst = int(indices[~valid].flat[0])
                    limit = int(np.max(size)) if np.ndim(size) == 0 else None
                    raise out_of_range(self.node.name, self.node.operator, input, axis, limit, worst)
                normal = np.clip(normal, 0, np.maximum(np.asarray(top) - 1, 0))
            return normal, (valid if run.bounds == "nan" else None)
        span = np.asarray(size)
        # int32 wherever the axis allows: it is what XLA gathers with, and a gradient's transpose, which is traced
        # outside of our 64-bit context, can't take more.
        narrow = np.max(span, initial=0) < 2**31 - 1
        if indices.dtype == np.uint64:  # above 2^63 it must not turn negative
            indices = jnp.minimum(indices, np.uint64(2**63 - 1))
        wide = indices.astype(jnp.int64)
        normal = jnp.where(wide < 0, wide + span, wide)
        valid = (normal >= 0) & (normal < np.asarray(top))
        if run.bounds == "check":
            limit = int(span) if span.ndim == 0 else None
            run.raise_alarm(~jnp.all(valid), Alarm("index", self.node.name, self.node.operator, input, axis, limit))
        normal = jnp.clip(normal, 0, np.maximum(np.asarray(top) - 1, 0))
        return normal.astype(jnp.int32 if narrow else jnp.int64), (valid if run.bounds == "nan" else None)

    def fill_invalid(self, result: Any, valid: Any) -> Any:
        """See `operators.Context.fill_invalid`."""
        if valid is None:
            return result
        kind = result.dtype
        if jnp.issubdtype(kind, jnp.inexact):
            bad = np.asarray(np.nan, kind)
        elif kind == np.bool_:
            bad = np.asarray(False)
        else:
            bad = np.asarray(ml_dtypes.iinfo(kind).min, kind)  # type: ignore[no-untyped-call]
        module = np if not has_traced(result) and not has_traced(valid) else jnp
        return module.where(valid, result, bad)

    def random_key(self, seed: Any = None) -> Any:
        """See `operators.Context.random_key`."""
        run = self.run
        key: Any
        if isinstance(seed, jax.Array):
            key = jax.lax.bitcast_convert_type(seed.reshape(()).astype(np.float32), np.uint32)
            key = jnp.stack([np.uint32(0), key])
        elif seed is not None:
            bits = np.float32(seed).view(np.uint32)
            key = np.array([0, bits], np.uint32)
        else:
            run.used_seed = True
            key = run.seed
        # The iterations first: a loop on the host folds them into the seed that its body's programs take.
        for number in (*run.iterations, *self.node.path):
            key = fold_in(key, number)
        return key

    def carry(self, body: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
        """See `operators.Context.carry`."""
        run = self.run

        def wrapped(*args: Any) -> tuple[Any, Any]:
            before, run.alarm = run.alarm, None
            try:
                result = body(*args)
                alarm = np.int32(0) if run.alarm is None else run.alarm
            finally:
                run.alarm = before
            return result, jnp.asarray(alarm, jnp.int32)

        return wrapped

    def absorb(self, alarm: Any) -> None:
        """See `operators.Context.absorb`."""
        if self.run.alarms:
            self.run.absorb(alarm)

    def refuse(self, bad: Any, message: str) -> None:
        """See `operators.Context.refuse`."""
        if isinstance(bad, jax.Array):
            alarm = Alarm("refused", self.node.name, self.node.operator, message=message)
            self.run.raise_alarm(jnp.any(bad), alarm)
        elif np.any(bad):
            raise self.error(message)

    def function(self, names: Sequence[str], result: str) -> Callable[..., Any]:
        """See `operators.Context.function`."""
        outer = self.run
        between = nodes_between(outer.producers, names, result)

        def compute(*values: Any) -> Any:
            # The nodes have run before, and rung their alarms: here they only compute.
            run = Run(tracing=True, seed=outer.seed, bounds="clamp", platform=outer.platform, producers=outer.producers)
            scope = Scope(dict(zip(names, values, strict=True)), outer=self.scope)
            self.walk(run, between, scope)
            return scope.read(result)

        return compute

    def error(self, message: str) -> OperatorError:
        """See `operators.Context.error`."""
        return OperatorError(
            f"{self.node.operator} {self.node.name!r}: {message}", node=self.node.name, operator=self.node.operator
        )

    def needs(self, value: Any, index: int, reason: str) -> Any:
        """See `operators.Context.needs`."""
        if not has_traced(value):
            return value
        return known_value(self.run, self.node, index, value, reason)

    def budget(self, shape: Sequence[int], dtype: Any) -> tuple[int, ...]:
        """See `operators.Context.budget`."""
        dims = tuple(int(d) for d in shape)
        if any(d < 0 for d in dims):
            raise self.error(f"shape {dims} has a negative dimension")
        count = math.prod(dims)
        if count > MAX_ELEMENTS:
            raise self.error(
                f"shape {dims} has {count} elements, more than the budget of {MAX_ELEMENTS}; "
                "a size in the input or in the model is too large"
            )
        limit = FOLD_BYTES if self.run.fold_limit is None else self.run.fold_limit
        if self.folding and count * np.dtype(dtype).itemsize > limit:
            raise TooLargeToFold
        return dims
