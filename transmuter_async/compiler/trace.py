"""Running nodes: on the host with numpy, or inside a JAX trace with what is known on the host folded away.

A value is a numpy array (known), a JAX value (traced), a list (sequence), a dict (map), None (left out, or an empty
optional), or `Opaque` (known only when the program runs, and not traceable: strings, maps). A node whose inputs are all
known is computed in numpy while tracing; everything else becomes part of the program. A node that needs a known value
and meets a traced one raises `NeedsValue`: the caller ends the segment before it.

While a segment is planned, small integers that entered it carry a *shadow*: their value of this call, and the names of
the arguments it was computed from. A need that a shadow can meet makes those arguments static instead of breaking.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transmuter_async.compiler.alarms import Alarm
from transmuter_async.compiler.context import NodeContext, TooLargeToFold
from transmuter_async.compiler.flow import never_stops
from transmuter_async.compiler.needs import admit, first_traced, needs_value
from transmuter_async.compiler.run import MAX_ELEMENTS, MAX_VISITS, SHADOW_ELEMENTS, Run, Scope, has_traced
from transmuter_async.compiler.settings import inlined
from transmuter_async.errors import NeedsValue, OperatorError, TransmuterError, UnsupportedModel
from transmuter_async.graph import Graph, Node, Value
from transmuter_async.operators import (
    HALF,
    PREPARED_INPUTS,
    ChannelsLast,
    Half,
    Operator,
    forced_trace,
    invoke,
    keep_channels_last,
    resolve,
    widen_half,
)

__all__ = ["run_node", "run_nodes"]

_CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)

TURN = 1e-3
"""Seconds for which a trace may hold the GIL before it offers it to others."""

_REFUSALS = (ValueError, TypeError, IndexError, KeyError, OverflowError, ArithmeticError, NotImplementedError)
"""What a definition may raise over its inputs, besides our own errors."""


def run_nodes(
    run: Run, nodes: Sequence[Node], scope: Scope, *, dying: Mapping[int, Iterable[str]] | None = None
) -> None:
    """Run nodes in order; their outputs land in `scope`. `dying` names the values not needed after the i-th node."""
    for index, node in enumerate(nodes):
        run_node(run, node, scope)
        if dying is not None:
            for name in dying.get(index, ()):
                scope.values.pop(name, None)


def run_node(run: Run, node: Node, scope: Scope) -> None:
    """Run one node.

    Raises:
        NeedsValue: It needs a value on the host that is traced.
        OperatorError: Its operator refuses the inputs.
        UnsupportedModel: Its operator has no definition.
    """
    definition = resolve(node.domain, node.op_type, node.opset)
    if definition is None:
        missing = (node.domain, node.op_type, node.opset, (node.name,))
        raise UnsupportedModel(
            f"{node.operator} at opset {node.opset} (node {node.name!r}) is not implemented; "
            "print(model.check()) lists every missing operator",
            missing=(missing,),
        )
    if run.weights and node.op_type == "Constant" and id(node.attributes.get("value")) in run.weights:
        scope.values[node.outputs[0]] = run.weights[id(node.attributes["value"])]
        return
    lying = "channels last" in run.lowerings
    read = scope.as_it_lies if lying or run.wide else scope.read
    values = [read(name) if name else None for name in node.inputs]
    forced = False
    if run.tracing:
        run.visits += 1
        if run.visits > MAX_VISITS:
            raise OperatorError(
                f"{node.operator} {node.name!r}: more than {MAX_VISITS} nodes were walked to plan one program; "
                "its control flow is nested too deeply",
                node=node.name,
                operator=node.operator,
            )
    elif len(values) > 1:
        _hold_operands_to_budget(run, node, values)
    attributes = {
        key: _Subgraph(run, value, scope, node) if isinstance(value, Graph) else value
        for key, value in node.attributes.items()
    }
    context = NodeContext(run, node, definition, scope, folding=run.fold_limit is not None, walk=run_nodes)
    halves: frozenset[int] = frozenset()
    if run.wide:
        values, halves = widen_half(definition, values, attributes, len(node.outputs), partial(_widened, run))
        context.wide = bool(halves)
    runner = {"n_outputs": len(node.outputs), "context": context}
    try:
        outputs = _kept(definition, values, attributes, runner) if lying else None
        if outputs is None:
            values = [value.plain() if isinstance(value, ChannelsLast) else value for value in values]
            if halves:
                values = [_completed(run, definition, i, value) for i, value in enumerate(values)]
            if run.tracing:
                values, forced = admit(run, node, definition, values)
                context.folding = context.folding or not forced
        if outputs is not None:
            pass
        elif forced:
            with forced_trace():
                outputs = _invoke(run, definition, values, attributes, runner)
        else:
            try:
                outputs = _invoke(run, definition, values, attributes, runner)
            except TooLargeToFold:
                if run.fold_limit is not None:
                    raise
                runner["context"] = again = NodeContext(run, node, definition, scope, folding=False, walk=run_nodes)
                again.wide = context.wide
                with forced_trace():
                    outputs = _invoke(run, definition, values, attributes, runner)
    except TransmuterError:
        raise
    except _CONCRETE as error:
        raise needs_value(run, node, first_traced(values), f"a value of {node.op_type} {node.name!r}") from error
    except MemoryError as error:
        raise context.error(f"there is not enough memory for its result: {error}; give smaller inputs") from error
    except _REFUSALS as error:
        raise OperatorError(
            f"{node.operator} {node.name!r} (opset {node.opset}) refuses its inputs "
            f"{', '.join(_describe(n, v) for n, v in zip(node.inputs, values, strict=True)) or '(none)'}: {error}",
            node=node.name,
            operator=node.operator,
        ) from error
    if len(outputs) < len(node.outputs) and any(node.outputs[len(outputs) :]):
        raise OperatorError(
            f"{node.operator} {node.name!r} gives {len(outputs)} outputs at opset {node.opset}, "
            f"the node asks for {len(node.outputs)}",
            node=node.name,
            operator=node.operator,
        )
    traced = False
    for index, (name, value) in enumerate(zip(node.outputs, outputs, strict=False)):
        if name:
            wide = index in halves and has_traced(value) and value.dtype == np.float32
            scope.values[name] = Half(value) if wide else value
            traced = traced or has_traced(value)
    if traced:
        seen = tuple(value.array if isinstance(value, ChannelsLast) else value for value in outputs)
        _hold_to_budget(context, seen)
        run.traced_nodes += 1
        if run.shadows is not None:
            _shadow(run, node, definition, values, attributes, outputs)
        if run.nonfinite != "ignore":
            _watch(run, node, seen, halves)
        _give_a_turn(run)
    elif not run.tracing and run.nonfinite != "ignore":
        _watch_on_host(run, node, outputs)


def _give_a_turn(run: Run) -> None:
    """Tracing holds the GIL: let the event loop have it now and then. Not after each node: sleeping takes 75 µs, a node 200."""
    now = time.monotonic()
    if now - run.gave_turn >= TURN:
        time.sleep(0)
        run.gave_turn = time.monotonic()


def _invoke(
    run: Run, definition: Operator, values: Sequence[Any], attributes: dict[str, Any], runner: dict[str, Any]
) -> tuple[Any, ...]:
    if not run.tracing:
        return invoke(definition, values, attributes, runner)
    with inlined(not definition.loops):
        return invoke(definition, values, attributes, runner)


def _kept(
    definition: Operator, values: Sequence[Any], attributes: dict[str, Any], runner: dict[str, Any]
) -> tuple[Any, ...] | None:
    with inlined(not definition.loops):
        return keep_channels_last(definition, values, attributes, runner)


def _hold_to_budget(context: NodeContext, outputs: Iterable[Any]) -> None:
    """Refuse results that are too large before a program allocates them."""
    for value in outputs:
        if isinstance(value, list):
            _hold_to_budget(context, value)
        elif isinstance(value, jax.Array) and value.size > MAX_ELEMENTS:
            context.budget(value.shape, value.dtype)


def _hold_operands_to_budget(run: Run, node: Node, values: Sequence[Any]) -> None:
    """On the host, refuse what broadcasting or a product of operands would make too large, before numpy allocates it.

    Only where the operands could do that at all; then the node is looked at without data, which takes time.
    """
    limit = MAX_ELEMENTS if run.fold_limit is None else min(MAX_ELEMENTS, run.fold_limit)
    most = 1
    for value in values:
        if isinstance(value, np.ndarray):
            most *= value.size or 1
    if most <= limit:
        return
    arrays = [value for value in values if isinstance(value, np.ndarray) and value.dtype != object]
    if len(arrays) < 2 or math.prod(array.size for array in arrays) <= limit:
        return
    try:
        if math.prod(np.broadcast_shapes(*(array.shape for array in arrays))) <= limit:
            return
    except ValueError:
        return
    if run.fold_limit is not None:
        raise TooLargeToFold
    scope = Scope(dict(zip(node.inputs, values, strict=True)))

    def abstract(given: dict[str, Any]) -> None:
        scope.values.update(given)
        run_node(Run(tracing=True, bounds="clamp"), node, scope)

    with suppress(NeedsValue):
        jax.eval_shape(
            abstract,
            {
                name: jax.ShapeDtypeStruct(value.shape, value.dtype)  # type: ignore[no-untyped-call]
                for name, value in zip(node.inputs, values, strict=True)
                if isinstance(value, np.ndarray) and value.dtype != object
            },
        )


def _describe(name: str, value: Any) -> str:
    if isinstance(value, list):
        return f"{name}: sequence of {len(value)}"
    if hasattr(value, "dtype"):
        return f"{name}: {value.dtype}{tuple(value.shape)}"
    return f"{name or '(left out)'}: {type(value).__name__}" if value is not None else "(left out)"


def _shadow(
    run: Run,
    node: Node,
    definition: Operator,
    values: list[Any],
    attributes: dict[str, Any],
    outputs: tuple[Any, ...],
) -> None:
    """Give integer results of shadowed integers a shadow: the same operator, on the host, on this call's values."""
    shadows = run.shadows
    assert shadows is not None
    if definition.random or any(isinstance(a, _Subgraph) for a in attributes.values()):
        return
    if not all(
        isinstance(out, (jax.Array, np.ndarray)) and out.dtype.kind in "iub" and out.ndim <= 1 for out in outputs
    ):
        return
    if any(out.size > SHADOW_ELEMENTS for out in outputs):
        return
    names: frozenset[str] = frozenset()
    known: list[Any] = []
    for value in values:
        if has_traced(value):
            entry = None if isinstance(value, list) else shadows.get(id(value))
            if entry is None:
                return
            known.append(entry[1])
            names |= entry[2]
        else:
            known.append(value)
    host = Run(tracing=False, bounds="clamp", platform=run.platform)
    runner = {
        "n_outputs": len(node.outputs),
        "context": NodeContext(host, node, definition, Scope(), folding=False, walk=run_nodes),
    }
    try:
        found = invoke(definition, known, attributes, runner)
    except (TransmuterError, *_REFUSALS):
        return  # what is wrong with these values is told when the node runs, if it does
    for traced, value in zip(outputs, found, strict=True):
        if has_traced(traced):
            shadows[id(traced)] = (traced, np.asarray(value), names)


def _watch(run: Run, node: Node, outputs: tuple[Any, ...], halves: frozenset[int]) -> None:
    for index, out in enumerate(outputs):
        if has_traced(out) and hasattr(out, "dtype") and jnp.issubdtype(out.dtype, jnp.inexact):
            bad = Half(out).overflows() if index in halves else ~jnp.all(jnp.isfinite(out))
            run.raise_alarm(bad, Alarm("nonfinite", node.name, node.operator))


def _completed(run: Run, definition: Operator, index: int, value: Any) -> Any:
    """An input of a node that computes wide: a float16 weight that the definition does not take itself becomes float32."""
    if not isinstance(value, np.ndarray) or value.dtype != HALF:
        return value
    own = (definition.domain, definition.name, definition.input_name(index)) in PREPARED_INPUTS
    return value if own else _widened(run, value)


def _widened(run: Run, weight: np.ndarray) -> Any:
    """A float16 weight as float32: made once for all programs where memory allows, else by the program."""
    made = run.prepare((weight,), "wide same", ())
    return run.lift(weight).astype(np.float32) if made is None else made


def _watch_on_host(run: Run, node: Node, outputs: tuple[Any, ...]) -> None:
    for out in outputs:
        if not hasattr(out, "dtype") or not jnp.issubdtype(out.dtype, jnp.inexact):
            continue
        if not np.all(np.isfinite(out)):
            alarm = Alarm("nonfinite", node.name, node.operator)
            if run.nonfinite == "error":
                raise alarm.error()
            if not run.warned:
                run.warned = True
                alarm.warn()


class _Subgraph:
    """A subgraph attribute, callable on values; see `operators.Subgraph`."""

    __slots__ = ("graph", "inputs", "node", "outputs", "run", "scope")

    def __init__(self, run: Run, graph: Graph, scope: Scope, node: Node) -> None:
        self.run = run
        self.graph = graph
        self.scope = scope
        self.node = node
        self.inputs: tuple[Value, ...] = graph.inputs
        self.outputs: tuple[Value, ...] = graph.outputs

    def __call__(self, *inputs: Any, iteration: Any = None) -> tuple[Any, ...]:
        graph, run = self.graph, self.run
        if len(inputs) != len(graph.inputs):
            raise ValueError(f"subgraph {graph.name!r} takes {len(graph.inputs)} inputs, not {len(inputs)}")
        given = run.weights
        scope = Scope({k: given.get(id(v), v) for k, v in graph.initializers.items()}, outer=self.scope)
        scope.values.update((value.name, each) for value, each in zip(graph.inputs, inputs, strict=True))
        before = run.iterations
        if iteration is not None:
            run.iterations = (*before, iteration)
        run.depth += 1
        try:
            with forced_trace(False):
                run_nodes(run, graph.nodes, scope)
            return tuple(scope.read(value.name) for value in graph.outputs)
        finally:
            run.iterations = before
            run.depth -= 1

    def never_stops(self) -> bool:
        """See `operators.Subgraph`."""
        return never_stops(self.graph, self.scope.read)
