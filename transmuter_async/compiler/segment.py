"""A run of nodes made into one XLA program.

Two passes over the nodes. The *plan* evaluates them abstractly: it finds where the segment stops and why, which names
it reads, which small integers it needs on the host (they become static), and which large known arrays become arguments.
The second pass traces exactly that for XLA. A segment holds the only reference to its program, so dropping it frees it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transmuter_async.compiler.facts import Observe, SegmentFailed, SegmentReady, SegmentStarted, Shapes
from transmuter_async.compiler.prepare import PreparedGraph
from transmuter_async.compiler.settings import pinned
from transmuter_async.compiler.trace import Alarm, Opaque, Run, Scope, has_traced, run_node
from transmuter_async.compiler.values import abstract, fingerprint, is_traceable, shapes_of, signature
from transmuter_async.errors import BreakRefused, CompileError, NeedsValue, TransmuterError

__all__ = ["CompileJob", "Layout", "Segment", "entry_key"]


@dataclass(frozen=True, slots=True)
class Layout:
    """What a segment looks at, so what its key is made of.

    Attributes:
        arguments: Names that enter by shape and dtype.
        values: Names that enter by value: static values, and host values of earlier segments.
    """

    arguments: tuple[str, ...]
    values: tuple[str, ...]


def entry_key(layout: Layout, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """The key of a segment with this layout for these values."""
    return (
        tuple([signature(values[name]) for name in layout.arguments]),
        tuple([fingerprint(values[name]) for name in layout.values]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A compiled run of nodes `[index, stop)`.

    Attributes:
        place: The way to its first node: its index, or for one in a body that runs on the host, the way there.
        position: Of its first node, in the file.
        stop: Index of the break node after it; the number of nodes at the end.
        needs: Why it stops there; None at the end.
        layout: With `key` its place in the cache.
        shapes: Of its arguments, for events.
        program: Called with (weights, arguments, seed); None where nothing is computed on the device.
        eager: The nodes run on the host on each call.
        arguments: Names of the program's arguments: those of the layout, less what no program can take (strings).
        outputs: Names of the values that the program returns.
        host_outputs: Values known while tracing that later nodes read.
        alarms: What the number beside the outputs means.
        host_values: Names that became static with this segment.
        node_count: Nodes of the segment that are really computed by the program.
    """

    place: tuple[Any, ...]
    index: int
    position: int
    stop: int
    needs: NeedsValue | None
    layout: Layout
    key: tuple[Any, ...]
    shapes: Shapes
    program: Any
    eager: bool
    weights: tuple[jax.Array, ...]
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    host_outputs: Mapping[str, Any]
    alarms: tuple[Alarm, ...]
    uses_seed: bool
    host_values: tuple[str, ...]
    node_count: int


@dataclass(slots=True)
class _Plan:
    stop: int
    needs: NeedsValue | None
    reads: set[str]
    statics: frozenset[str]
    lifted: list[np.ndarray]
    outputs: tuple[str, ...]
    host_outputs: dict[str, Any]
    alarms: tuple[Alarm, ...]
    uses_seed: bool
    traced_nodes: int


_SEED = jax.ShapeDtypeStruct((2,), np.uint32)


class CompileJob:
    """The work of making one segment; runs on any thread, once.

    Attributes:
        key: Jobs with the same key give the same segment: one compile serves all who wait.
        position: Of the segment's first node.
        shapes: Of everything that may enter it.
    """

    def __init__(
        self,
        prepared: PreparedGraph,
        index: int,
        values: Mapping[str, Any],
        known: frozenset[str],
        statics: frozenset[str],
        *,
        first: bool,
    ) -> None:
        self.prepared = prepared
        self.index = index
        self.place = (*prepared.path, index)
        self.position = prepared.position(index)
        self._values = dict(values)
        self._known = known
        self._statics = statics
        self._first = first
        by_value = known | statics
        layout = Layout(
            tuple(sorted(name for name in values if name not in by_value)),
            tuple(sorted(name for name in values if name in by_value)),
        )
        self.key = (self.place, layout, entry_key(layout, values))
        self.shapes: Shapes = tuple(shapes_of(name, values[name]) for name in layout.arguments)

    def statics(self) -> frozenset[str]:
        """The names that this segment needs by value, found without compiling."""
        with pinned(device=self.prepared.device, precision=self.prepared.options.precision):
            return self._settled_plan().statics

    def run(self, observe: Observe) -> Segment:
        """Plan, trace and compile.

        Raises:
            BreakRefused: The segment ends at a break and the options refuse breaks.
            CompileError: XLA refused the program.
            OperatorError: A node refuses its inputs.
        """
        observe(SegmentStarted(self.position, self.shapes))
        options = self.prepared.options
        try:
            with pinned(device=self.prepared.device, precision=options.precision):
                segment = self._compile()
        except BaseException as error:
            observe(SegmentFailed(self.position, self.shapes, error))
            raise
        observe(
            SegmentReady(
                position=segment.position,
                shapes=segment.shapes,
                stop="end" if segment.needs is None else segment.needs.position,
                compiled=segment.program is not None,
                reason=None if segment.needs is None else segment.needs.reason,
                host_values=segment.host_values,
                disk_cache=None,
            )
        )
        return segment

    def _compile(self) -> Segment:
        prepared, options = self.prepared, self.prepared.options
        plan = self._settled_plan()
        if plan.needs is not None and options.breaks == "error":
            raise BreakRefused(f"the graph would break, which breaks='error' refuses: {plan.needs}") from plan.needs
        values = {name: self._values[name] for name in plan.reads if name in self._values}
        by_value = (self._known | plan.statics) & frozenset(values)
        opaque = {name for name, value in values.items() if not is_traceable(value) and name not in by_value}
        layout = Layout(tuple(sorted(values.keys() - by_value)), tuple(sorted(by_value)))
        eager = not self._first and plan.traced_nodes < options.min_segment_nodes
        arguments = tuple(name for name in layout.arguments if name not in opaque)
        compiles = plan.traced_nodes > 0 and not eager
        program = self._program(plan, arguments) if compiles else None
        if self.index == 0 and not prepared.path:
            prepared.graph_break = plan.needs is not None
        return Segment(
            place=self.place,
            index=self.index,
            position=self.position,
            stop=plan.stop,
            needs=plan.needs,
            layout=layout,
            key=entry_key(layout, values),
            shapes=tuple(shapes_of(name, values[name]) for name in layout.arguments),
            program=program,
            eager=eager,
            weights=prepared.on_device(_distinct(plan.lifted)[0]) if compiles else (),
            arguments=arguments,
            outputs=plan.outputs,
            host_outputs=plan.host_outputs,
            alarms=plan.alarms,
            uses_seed=plan.uses_seed,
            host_values=tuple(sorted(plan.statics - self._statics)),
            node_count=plan.traced_nodes,
        )

    def _settled_plan(self) -> _Plan:
        """A plan whose static values are host values from the start: what follows from them is then folded as well."""
        statics = self._statics
        while True:
            plan = self._plan(statics)
            if plan.statics == statics:
                return plan
            statics = plan.statics

    def _plan(self, statics: frozenset[str]) -> _Plan:
        """Evaluate the nodes abstractly, as far as they go without a break."""
        prepared, nodes = self.prepared, self.prepared.nodes
        traceable, entry = self._split(statics)
        plan: _Plan | None = None

        def evaluate(arguments: dict[str, Any], seed: Any) -> None:
            nonlocal plan
            lifted: list[np.ndarray] = []

            def lift(array: np.ndarray) -> Any:
                lifted.append(array)
                return jax.lax.broadcast(jnp.asarray(np.zeros((), array.dtype)), array.shape)

            run = self._run(seed, lift)
            run.shadows = {}
            for name, tracer in arguments.items():
                if self._may_be_static(name):
                    value = np.asarray(self._values[name])
                    run.shadows[id(tracer)] = (tracer, value, frozenset({name}))
            reads: set[str] = set()
            scope = self._scope({**entry, **arguments}, reads)
            stop, needs = len(nodes), None
            for index in range(self.index, len(nodes)):
                before = len(run.alarms), set(run.statics), len(lifted), run.traced_nodes
                try:
                    run_node(run, nodes[index], scope)
                except NeedsValue as error:
                    error.__traceback__ = None  # its frames hold tracers and arrays
                    error.__cause__ = error.__context__ = None
                    stop, needs = index, error
                    del run.alarms[before[0] :], lifted[before[2] :]
                    run.statics, run.traced_nodes = before[1], before[3]
                    break
            live = [
                name
                for index in range(self.index, stop)
                for name in nodes[index].outputs
                if name and prepared.last_use.get(name, -1) >= stop
            ]
            plan = _Plan(
                stop=stop,
                needs=needs,
                reads=reads,
                statics=statics | run.statics,
                lifted=lifted,
                outputs=tuple(name for name in live if has_traced(scope.values[name])),
                host_outputs={name: scope.values[name] for name in live if not has_traced(scope.values[name])},
                alarms=tuple(run.alarms),
                uses_seed=run.used_seed,
                traced_nodes=run.traced_nodes,
            )

        jax.eval_shape(evaluate, {name: abstract(self._values[name]) for name in traceable}, _SEED)
        assert plan is not None
        return plan

    def _program(self, plan: _Plan, arguments: Sequence[str]) -> Any:
        prepared, nodes = self.prepared, self.prepared.nodes
        _, entry = self._split(plan.statics)
        weights, slots = _distinct(plan.lifted)

        def compute(given: tuple[Any, ...], values: tuple[Any, ...], seed: Any) -> tuple[tuple[Any, ...], Any]:
            order = iter(slots)

            def lift(array: np.ndarray) -> Any:
                found = given[next(order)]
                assert found.shape == array.shape and found.dtype == array.dtype, "the plan and the trace disagree"
                return found

            run = self._run(seed, lift)
            scope = self._scope({**entry, **dict(zip(arguments, values, strict=True))}, set())
            for index in range(self.index, plan.stop):
                run_node(run, nodes[index], scope)
            entered = {id(leaf) for leaf in jax.tree.leaves((given, values))}
            outputs = tuple(
                # A program's input returned as it is would be the same memory as the caller's.
                jax.tree.map(lambda leaf: jnp.copy(leaf) if id(leaf) in entered else leaf, scope.values[name])
                for name in plan.outputs
            )
            return outputs, run.alarm

        structs = (
            tuple(abstract(array) for array in weights),
            tuple(abstract(self._values[name]) for name in arguments),
            _SEED,
        )
        try:
            lowered = jax.jit(compute).lower(*structs)
            return lowered.compile()
        except TransmuterError:
            raise
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            raise CompileError(
                f"XLA refused the program of nodes {self.index} to {plan.stop} of {self.prepared.model.source!r}: {error}"
            ) from error

    def _run(self, seed: Any, lift: Any) -> Run:
        options = self.prepared.options
        return Run(
            tracing=True,
            seed=seed,
            bounds=options.bounds,
            nonfinite=options.nonfinite,
            platform=self.prepared.platform,
            lift=lift,
            producers=self.prepared.producers,
        )

    def _scope(self, entry: dict[str, Any], reads: set[str]) -> Scope:
        weights = {k: v for k, v in self.prepared.graph.initializers.items() if k not in self._values}
        return Scope(outer=Scope(entry, outer=Scope(weights), reads=reads))

    def _split(self, statics: frozenset[str]) -> tuple[list[str], dict[str, Any]]:
        """Names that are traced, and the entry's other values."""
        traceable, entry = [], {}
        for name in sorted(self._values):
            value = self._values[name]
            if name in statics or name in self._known or value is None:
                entry[name] = np.asarray(value) if isinstance(value, jax.Array) else value
            elif is_traceable(value):
                traceable.append(name)
            else:
                entry[name] = Opaque()
        return traceable, entry

    def _may_be_static(self, name: str) -> bool:
        value = self._values[name]
        return name in self.prepared.dim_like and getattr(value, "dtype", np.dtype(object)).kind in "iub"


def _distinct(arrays: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[int]]:
    """The distinct arrays, and for each of `arrays` the place of its own among them."""
    places: dict[int, int] = {}
    distinct: list[np.ndarray] = []
    slots = []
    for array in arrays:
        if id(array) not in places:
            places[id(array)] = len(distinct)
            distinct.append(array)
        slots.append(places[id(array)])
    return distinct, slots
