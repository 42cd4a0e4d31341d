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
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from transmuter_async.errors import (
    IndexOutOfRange,
    NeedsValue,
    NonFiniteError,
    NonFiniteWarning,
    OperatorError,
    TransmuterError,
    UnsupportedModel,
)
from transmuter_async.graph import Graph, Node, Value
from transmuter_async.operators import Operator, first_alarm, fold_in, forced_trace, invoke, resolve

__all__ = ["Alarm", "Opaque", "Run", "Scope", "TooLargeToFold", "heard", "never_stops", "nodes_between", "run_node", "run_nodes"]

_listener: ContextVar[list[str] | None] = ContextVar("transmuter_async_heard", default=None)


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect what `nonfinite="warn"` says in this thread, instead of issuing it here.

    A warning is of use in the thread and at the line of whoever called; filters, `catch_warnings` and `-W error` of a worker
    thread are nobody's.
    """
    texts: list[str] = []
    token = _listener.set(texts)
    try:
        yield texts
    finally:
        _listener.reset(token)


MAX_ELEMENTS = 1 << 30
"""Elements of any one planned tensor: sizes may come from a stranger's file, or from a value at a break."""

FOLD_BYTES = 64 << 10
"""Known values larger than this are computed by the program, not folded into it."""

MAX_VISITS = 1 << 20
"""Nodes that one pass may walk: the body of a loop is tried before it is traced, so loops in loops in loops multiply."""

SHADOW_ELEMENTS = 4096
"""Values of more elements are not followed on the host while a segment is planned."""

LIFT_BYTES = 256
"""Known values larger than this enter a program as an argument, not as a constant."""

_CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)

_REFUSALS = (ValueError, TypeError, IndexError, KeyError, OverflowError, ArithmeticError, NotImplementedError)
"""What a definition may raise over its inputs, besides our own errors."""


class Opaque:
    """Stands for a value that a trace can neither know nor compute with."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "a value that only exists when the program runs"


@dataclass(frozen=True, slots=True)
class Alarm:
    """What a program can report beside its outputs: alarm `i` of a program is the number `i + 1`."""

    kind: str  # "index" | "nonfinite" | "refused"
    node: str
    operator: str
    input: str = ""
    axis: int | None = None
    size: int | None = None
    message: str = ""

    def error(self) -> TransmuterError:
        """The exception that the alarm stands for."""
        if self.kind == "refused":
            return OperatorError(f"{self.operator} {self.node!r}: {self.message}", node=self.node, operator=self.operator)
        if self.kind == "nonfinite":
            return NonFiniteError(
                f"{self.operator} {self.node!r} gave NaN or infinity. Look at its inputs with transmuter compare, "
                'or run with nonfinite="ignore".',
                node=self.node,
            )
        return _out_of_range(self.node, self.operator, self.input, self.axis, self.size, None)

    def warn(self) -> None:
        """Warn instead, as `nonfinite="warn"` asks for; or tell whoever listens in this thread (see `heard`)."""
        text, listener = str(self.error()), _listener.get()
        if listener is None:
            warnings.warn(text, NonFiniteWarning, stacklevel=2)
        else:
            listener.append(text)


def _out_of_range(
    node: str, operator: str, input: str, axis: int | None, size: int | None, value: int | None
) -> IndexOutOfRange:
    where = "" if axis is None else f" on axis {axis}"
    limit = "" if size is None else f" of size {size} (allowed are {-size} to {size - 1})"
    what = "an index" if value is None else f"index {value}"
    return IndexOutOfRange(
        f"{operator} {node!r}: {what} in {input!r} is out of range{where}{limit}. "
        'Check the ids that go in (a tokenizer of another model?), or compile with bounds="clamp".',
        node=node,
        input=input,
        axis=axis,
        size=size,
    )


class Scope:
    """Values by name; a subgraph's scope sees those of the graphs around it. `reads` notes what was read of an outermost one."""

    __slots__ = ("outer", "reads", "values")

    def __init__(
        self, values: dict[str, Any] | None = None, *, outer: Scope | None = None, reads: set[str] | None = None
    ) -> None:
        self.values = {} if values is None else values
        self.outer = outer
        self.reads = reads

    def read(self, name: str) -> Any:
        """The value of a name; KeyError for one that is not defined."""
        if name in self.values:
            if self.reads is not None:
                self.reads.add(name)
            return self.values[name]
        if self.outer is None:
            raise KeyError(name)
        return self.outer.read(name)


@dataclass(slots=True)
class Run:
    """One pass over nodes: a host run, a plan, or the trace of a program. Owned by one thread.

    Attributes:
        tracing: Whether JAX values are computed with. Off, everything is numpy.
        seed: The run's random key, (2,) uint32, host or traced.
        bounds: "check", "clamp" or "nan".
        shadows: While planning, `id(tracer) -> (tracer, its value in this call, names it comes from)`; else None.
        statics: While planning, the arguments that turned out to be needed on the host.
        lift: Gives the argument that stands for a large known array.
        weights: By `id` of an initializer or Constant of a body: what stands for it, where the caller gives weights of its own.
        producers: Node by output name, for the text of breaks.
        fold_limit: Where constants are folded, the bytes that a result may take: above them `TooLargeToFold` is raised.
    """

    tracing: bool
    seed: Any = field(default_factory=lambda: np.zeros(2, np.uint32))
    bounds: str = "check"
    nonfinite: str = "ignore"
    platform: str = "cpu"
    shadows: dict[int, tuple[Any, np.ndarray, frozenset[str]]] | None = None
    statics: set[str] = field(default_factory=set)
    lift: Callable[[np.ndarray], Any] = lambda array: array
    weights: Mapping[int, Any] = field(default_factory=dict)
    producers: Mapping[str, Node] = field(default_factory=dict)
    alarms: list[Alarm] = field(default_factory=list)
    alarm: Any = None
    iterations: tuple[Any, ...] = ()
    used_seed: bool = False
    warned: bool = False
    traced_nodes: int = 0
    depth: int = 0
    fold_limit: int | None = None
    visits: int = 0

    def raise_alarm(self, bad: Any, alarm: Alarm) -> None:
        """Note that `bad` (traced bool) means `alarm`; an error beats a warning, then the first node wins."""
        self.alarms.append(alarm)
        number = len(self.alarms)
        if alarm.kind == "nonfinite" and self.nonfinite == "warn":
            number = -number
        self.absorb(jnp.where(bad, np.int32(number), np.int32(0)))

    def absorb(self, number: Any) -> None:
        """Take an alarm's number; 0 is none, below 0 a warning."""
        self.alarm = number if self.alarm is None else first_alarm(self.alarm, number)


def run_nodes(run: Run, nodes: Sequence[Node], scope: Scope, *, dying: Mapping[int, Iterable[str]] | None = None) -> None:
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
    values = [scope.read(name) if name else None for name in node.inputs]
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
        values, forced = _admit(run, node, definition, values)
    elif len(values) > 1:
        _hold_operands_to_budget(run, node, values)
    attributes = {
        key: _Subgraph(run, value, scope, node) if isinstance(value, Graph) else value
        for key, value in node.attributes.items()
    }
    context = NodeContext(run, node, definition, scope, folding=(run.tracing and not forced) or run.fold_limit is not None)
    runner = {"n_outputs": len(node.outputs), "context": context}
    try:
        if forced:
            with forced_trace():
                outputs = invoke(definition, values, attributes, runner)
        else:
            try:
                outputs = invoke(definition, values, attributes, runner)
            except TooLargeToFold:
                if run.fold_limit is not None:
                    raise
                runner["context"] = NodeContext(run, node, definition, scope, folding=False)
                with forced_trace():
                    outputs = invoke(definition, values, attributes, runner)
    except TransmuterError:
        raise
    except _CONCRETE as error:
        raise _needs(run, node, _first_traced(values), f"a value of {node.op_type} {node.name!r}") from error
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
    for name, value in zip(node.outputs, outputs, strict=False):
        if name:
            scope.values[name] = value
            traced = traced or has_traced(value)
    if traced:
        _hold_to_budget(context, outputs)
        run.traced_nodes += 1
        if run.shadows is not None:
            _shadow(run, node, definition, values, attributes, outputs)
        if run.nonfinite != "ignore":
            _watch(run, node, outputs)
        time.sleep(0)  # tracing holds the GIL: give the event loop its turn
    elif not run.tracing and run.nonfinite != "ignore":
        _watch_on_host(run, node, outputs)


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
    arrays = [value for value in values if isinstance(value, np.ndarray) and value.dtype != object]
    limit = MAX_ELEMENTS if run.fold_limit is None else min(MAX_ELEMENTS, run.fold_limit)
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


def has_traced(value: Any) -> bool:
    """Whether a value is, or holds, a JAX value."""
    if isinstance(value, list):
        return any(map(has_traced, value))
    return isinstance(value, jax.Array)


def _is_opaque(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_opaque, value))
    return isinstance(value, Opaque)


def _first_traced(values: Sequence[Any]) -> int:
    return next((i for i, v in enumerate(values) if has_traced(v) or _is_opaque(v)), 0)


def _describe(name: str, value: Any) -> str:
    if isinstance(value, list):
        return f"{name}: sequence of {len(value)}"
    if hasattr(value, "dtype"):
        return f"{name}: {value.dtype}{tuple(value.shape)}"
    return f"{name or '(left out)'}: {type(value).__name__}" if value is not None else "(left out)"


def _admit(run: Run, node: Node, definition: Operator, values: list[Any]) -> tuple[list[Any], bool]:
    """Make a node's inputs fit for a trace: needs met, large known values lifted. Whether the result is forced to be traced."""
    if any(map(_is_opaque, values)):
        index = next(i for i, v in enumerate(values) if _is_opaque(v))
        raise _needs(run, node, index, f"the {definition.input_name(index)} of {node.op_type} {node.name!r}")
    large = any(isinstance(v, np.ndarray) and v.nbytes > FOLD_BYTES and v.dtype != object for v in values)
    traced = [has_traced(v) for v in values]
    if definition.host:
        if any(traced):
            value = node.inputs[traced.index(True)]
            raise depends_on_values(node, value, run.producers.get(value))
        return values, False
    if not any(traced) and not large and not definition.random:
        return values, False
    if any(isinstance(v, np.ndarray) and v.dtype == object for v in values) or any(isinstance(v, dict) for v in values):
        if any(traced):
            raise _needs(run, node, traced.index(True), f"{node.op_type} of strings")
        return values, False
    admitted = list(values)
    for index, value in enumerate(values):
        name = definition.input_name(index)
        if name in definition.static:
            if traced[index]:
                admitted[index] = _known_value(run, node, index, value, f"the {name} of {node.op_type} {node.name!r}")
        elif isinstance(value, np.ndarray):
            admitted[index] = run.lift(value) if value.nbytes > LIFT_BYTES else value
        elif isinstance(value, list):
            admitted[index] = [
                run.lift(v) if isinstance(v, np.ndarray) and v.nbytes > LIFT_BYTES and v.dtype != object else v for v in value
            ]
    forced = definition.random or (large and not any(has_traced(v) for v in admitted))
    return admitted, forced


def _known_value(run: Run, node: Node, index: int, value: Any, reason: str) -> Any:
    """The value of a traced input by its shadow, which makes its ancestors static; `NeedsValue` where it has none."""
    if isinstance(value, list):
        return [_known_value(run, node, index, item, reason) if has_traced(item) else item for item in value]
    if run.shadows is not None:
        entry = run.shadows.get(id(value))
        if entry is not None:
            run.statics |= entry[2]
            return entry[1]
    raise _needs(run, node, index, reason)


def _needs(run: Run, node: Node, index: int, reason: str) -> NeedsValue:
    value = node.inputs[index] if index < len(node.inputs) else ""
    return _missing_value(node, value, run.producers.get(value), reason)


def _missing_value(node: Node, value: str, producer: Node | None, reason: str) -> NeedsValue:
    hint = (
        f"Pass static_inputs=[{value!r}] to compile for each of its values."
        if producer is None
        else "Export the model with fixed sizes or without the value-dependent operator."
    )
    return NeedsValue(
        node=node.name,
        operator=node.operator,
        position=node.position,
        value=value,
        producer=None if producer is None else producer.name,
        reason=reason,
        hint=hint,
    )


def depends_on_values(node: Node, value: str, producer: Node | None) -> NeedsValue:
    """The break at an operator whose output shape depends on its data, for one of its run-time inputs."""
    return _missing_value(node, value, producer, f"{node.op_type}: output shape depends on values")


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
    if not all(isinstance(out, (jax.Array, np.ndarray)) and out.dtype.kind in "iub" and out.ndim <= 1 for out in outputs):
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
    runner = {"n_outputs": len(node.outputs), "context": NodeContext(host, node, definition, Scope(), folding=False)}
    try:
        found = invoke(definition, known, attributes, runner)
    except (TransmuterError, *_REFUSALS):
        return  # what is wrong with these values is told when the node runs, if it does
    for traced, value in zip(outputs, found, strict=True):
        if has_traced(traced):
            shadows[id(traced)] = (traced, np.asarray(value), names)


def _floats(outputs: tuple[Any, ...]) -> list[Any]:
    return [o for o in outputs if hasattr(o, "dtype") and jnp.issubdtype(o.dtype, jnp.inexact)]


def _watch(run: Run, node: Node, outputs: tuple[Any, ...]) -> None:
    for out in _floats(outputs):
        if has_traced(out):
            run.raise_alarm(~jnp.all(jnp.isfinite(out)), Alarm("nonfinite", node.name, node.operator))


def _watch_on_host(run: Run, node: Node, outputs: tuple[Any, ...]) -> None:
    for out in _floats(outputs):
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
            run_nodes(run, graph.nodes, scope)
            return tuple(scope.read(value.name) for value in graph.outputs)
        finally:
            run.iterations = before
            run.depth -= 1


    def never_stops(self) -> bool:
        """See `operators.Subgraph`."""
        return never_stops(self.graph, self.scope.read)


def never_stops(body: Graph, read: Callable[[str], Any]) -> bool:
    """Whether a Loop's body hands on the condition that it was given, or one that is always true.

    Args:
        body: The loop's body.
        read: Gives the value of a name of the graphs around it, KeyError for one that they do not have.
    """
    producers = {name: node for node in body.nodes for name in node.outputs}
    name = body.outputs[0].name
    while name in producers and producers[name].op_type == "Identity":
        name = producers[name].inputs[0]
    if name == body.inputs[1].name:
        return True
    if name in producers:
        value = producers[name].attributes.get("value") if producers[name].op_type == "Constant" else None
    elif name in {value.name for value in body.inputs}:
        return False
    else:
        try:
            value = body.initializers[name] if name in body.initializers else read(name)
        except KeyError:
            return False
    return isinstance(value, np.ndarray) and bool(value.all())


def nodes_between(producers: Mapping[str, Node], names: Sequence[str], result: str) -> list[Node]:
    """The nodes through which `result` depends on `names`, in an order in which they can run."""
    ordered: list[Node] = []
    depends: dict[str, bool] = dict.fromkeys(names, True)

    def visit(name: str) -> bool:
        stack = [name]
        while stack:
            current = stack[-1]
            node = producers.get(current)
            if current in depends or node is None:
                depends.setdefault(current, False)
                stack.pop()
                continue
            waiting = [each for each in node.inputs if each and each not in depends]
            if waiting:
                stack.extend(waiting)
                continue
            found = any(depends[each] for each in node.inputs if each)
            if found:
                ordered.append(node)
            depends.update((output, found) for output in node.outputs if output not in names)
            stack.pop()
        return depends[name]

    visit(result)
    return ordered


class TooLargeToFold(Exception):
    """A known result is above the folding budget: compute it in the program instead."""


class NodeContext:
    """The `operators.Context` of one node in one run."""

    __slots__ = ("definition", "folding", "node", "opset", "platform", "run", "scope")

    def __init__(self, run: Run, node: Node, definition: Operator, scope: Scope, *, folding: bool) -> None:
        self.run = run
        self.scope = scope
        self.node = node
        self.definition = definition
        self.opset = node.opset
        self.platform = run.platform
        self.folding = folding

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
                    raise _out_of_range(self.node.name, self.node.operator, input, axis, limit, worst)
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
            run.raise_alarm(
                ~jnp.all(valid), Alarm("index", self.node.name, self.node.operator, input, axis, limit)
            )
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

    def random_key(self, seed: float | None = None) -> Any:
        """See `operators.Context.random_key`."""
        run = self.run
        if seed is not None:
            bits = np.float32(seed).view(np.uint32)
            key: Any = np.array([0, bits], np.uint32)
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
            run_nodes(run, between, scope)
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
        return _known_value(self.run, self.node, index, value, reason)

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
