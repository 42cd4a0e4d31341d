"""A run of nodes made into one XLA program.

Two passes over the nodes. The *plan* evaluates them abstractly: it finds where the segment stops and why, which names
it reads, which small integers it needs on the host (they become static), and which large known arrays become arguments.
The second pass traces exactly that for XLA. A segment holds the only reference to its program, so dropping it frees it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transmuter_async.compiler.alarms import Alarm
from transmuter_async.compiler.facts import Observe, SegmentFailed, SegmentReady, SegmentStarted, Shapes
from transmuter_async.compiler.placement import laid_out, launcher, usable_donations
from transmuter_async.compiler.prepare import PreparedGraph
from transmuter_async.compiler.run import Opaque, Run, Scope, has_traced
from transmuter_async.compiler.segment import Layout, Making, Segment, entry_key
from transmuter_async.compiler.settings import pinned
from transmuter_async.compiler.stored import Stored
from transmuter_async.compiler.trace import run_node
from transmuter_async.compiler.tuning import Variant
from transmuter_async.compiler.values import abstract, is_traceable, sequence_length, shapes_of
from transmuter_async.errors import BreakRefused, CompileError, NeedsValue, TransmuterError
from transmuter_async.graph import Node
from transmuter_async.operators import compile_program, module_size

__all__ = ["Built", "CompileJob", "forced_break"]


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
    output_trees: list[int | None]
    output_kinds: list[tuple[Any, Any]]
    lowerings: tuple[tuple[str, str, str], ...] = ()
    rounds: tuple[frozenset[str], ...] = ()  # the static names known at the start of each round, the last is final
    all_reads: frozenset[str] = frozenset()  # in any round


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """A segment as it was compiled, with what its file on disk holds besides.

    Attributes:
        segment: The segment.
        weights: On the host, in the order of the program's.
        all_reads: Names of values that the trace read.
        rounds: The static names known at the start of each round of the plan.
        output_trees: The length of each output that is a sequence, None for a tensor.
    """

    segment: Segment
    weights: Sequence[np.ndarray]
    all_reads: frozenset[str]
    rounds: tuple[frozenset[str], ...]
    output_trees: Sequence[int | None]


_SEED = abstract(np.zeros(2, np.uint32))


class CompileJob:
    """The work of making one segment; runs on any thread, once.

    Attributes:
        key: Jobs with the same key give the same segment: one compile serves all who wait.
        place: The way to the segment's first node.
        position: Of that node, in the file.
        values: What may enter it, by name.
        known: Names of those that are host values.
        statics_known: Names that are static so far at this position, by earlier calls.
        statics_given: Those of them that the caller named. The plan starts from these alone, so that neither programs
            nor their names on disk depend on what was called before.
        first: Whether it is the first segment of the graph, which is compiled however small.
        shapes: Of everything that may enter it.
        variant: The way in which it is compiled.
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
        self.values = dict(values)
        self.known = known
        self.statics_known = statics
        self.statics_given = statics & frozenset(prepared.options.static_inputs)
        self.first = first
        self.variant = Variant(prepared.lowerings)
        by_value = known | statics
        layout = Layout(
            tuple(sorted(name for name in values if name not in by_value)),
            tuple(sorted(name for name in values if name in by_value)),
        )
        self.key = (self.place, layout, entry_key(layout, values))
        self.shapes: Shapes = tuple(shapes_of(name, values[name]) for name in layout.arguments)

    def lighten(self) -> None:
        """Let go of the arrays that only their shape matters of, and copy the others.

        For a job that runs when its call has long been answered: it must not keep the caller's arrays alive, nor read what
        the caller may have written to them by then.
        """
        by_value = self.known | self.statics_known
        self.values = {
            name: _copied(value) if name in by_value or self._may_be_static(name) else _stand_in(value)
            for name, value in self.values.items()
        }

    def lightened(self) -> CompileJob:
        """Another job for the same segment that keeps none of the caller's arrays; see `lighten`."""
        found = copy.copy(self)
        found.lighten()
        return found

    def statics(self) -> frozenset[str]:
        """The names that this segment needs by value, found without compiling."""
        with pinned(device=self.prepared.device, precision=self.prepared.options.precision):
            return self._settled_plan().statics

    def outlook(self) -> tuple[int, Mapping[str, Any]]:
        """Where the segment stops, and the values for later nodes that its trace knows, found without compiling.

        Raises:
            BreakRefused: It stops at a break and the options refuse breaks.
        """
        with pinned(device=self.prepared.device, precision=self.prepared.options.precision):
            plan = self._settled_plan()
        self._breaks(plan)
        return plan.stop, plan.host_outputs

    def breaks(self) -> bool:
        """Whether the segment would end before the graph does, found without compiling.

        Raises:
            BreakRefused: It would, and the options refuse breaks.
        """
        with pinned(device=self.prepared.device, precision=self.prepared.options.precision):
            return self._breaks(self._settled_plan())

    def _breaks(self, plan: _Plan) -> bool:
        refused = self.prepared.options.refuses_breaks
        if plan.needs is not None and refused is not None:
            raise BreakRefused(f"the graph would break, which {refused} refuses: {plan.needs}") from plan.needs
        return plan.needs is not None

    def run(self, observe: Observe) -> Segment:
        """Plan, trace and compile.

        Raises:
            BreakRefused: The segment ends at a break and the options refuse breaks.
            CompileError: XLA refused the program.
            OperatorError: A node refuses its inputs.
        """
        observe(SegmentStarted(self.position, self.shapes))
        prepared = self.prepared
        disk_cache: str | None = None
        try:
            with pinned(device=prepared.device, precision=prepared.options.precision):
                stored = None if prepared.root.disk is None else Stored(self, prepared.root.disk)
                segment = None if stored is None else stored.load(observe)
                if segment is not None:
                    disk_cache = "hit"
                else:
                    built = self.build()
                    segment = built.segment
                    if stored is not None and segment.program is not None:
                        stored.save(built, observe)
                        disk_cache = "rejected" if stored.rejected else "miss"
        except BaseException as error:
            observe(SegmentFailed(self.position, self.shapes, error))
            raise
        if self.index == 0 and not prepared.path:
            prepared.graph_break = segment.needs is not None
        observe(_ready(segment, disk_cache))
        return segment

    def trial(self, variant: Variant, name: str, observe: Observe) -> Built:
        """The same segment compiled in another way, within `pinned`; raises as `run`."""
        job = copy.copy(self)
        job.variant = variant
        observe(SegmentStarted(self.position, self.shapes, name))
        try:
            built = job.build()
        except BaseException as error:
            observe(SegmentFailed(self.position, self.shapes, error))
            raise
        observe(_ready(built.segment, None))
        return built

    def build(self) -> Built:
        """Plan, trace and compile, within `pinned` and without a word to anybody; raises as `run`."""
        prepared, options = self.prepared, self.prepared.options
        began = time.perf_counter_ns()
        plan = self._settled_plan()
        planning = time.perf_counter_ns() - began
        self._breaks(plan)
        values = {name: self.values[name] for name in plan.reads if name in self.values}
        by_value = (self.known | plan.statics) & frozenset(values)
        opaque = {name for name, value in values.items() if not is_traceable(value) and name not in by_value}
        layout = Layout(tuple(sorted(values.keys() - by_value)), tuple(sorted(by_value)))
        eager = not self.first and plan.traced_nodes < options.min_segment_nodes
        arguments = tuple(name for name in layout.arguments if name not in opaque)
        compiles = plan.traced_nodes > 0 and not eager
        weights = _distinct(plan.lifted)[0] if compiles else []
        donated = self._donated(plan, arguments) if compiles else ()
        program, making = self._program(plan, arguments, donated, planning) if compiles else (None, None)
        segment = Segment(
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
            weights=prepared.on_device(weights),
            arguments=arguments,
            outputs=plan.outputs,
            host_outputs=plan.host_outputs,
            alarms=plan.alarms,
            uses_seed=plan.uses_seed,
            host_values=tuple(sorted(plan.statics - self.statics_known)),
            node_count=plan.traced_nodes,
            donated=donated,
            lowerings=plan.lowerings,
            making=making,
        )
        return Built(segment, weights, plan.all_reads, plan.rounds, plan.output_trees)

    def _settled_plan(self) -> _Plan:
        """A plan whose static values are host values from the start: what follows from them is then folded as well."""
        rounds = [self.statics_given]
        reads: set[str] = set()
        while True:
            plan = self._plan(rounds[-1])
            reads |= plan.reads
            if plan.statics == rounds[-1]:
                plan.rounds, plan.all_reads = tuple(rounds), frozenset(reads)
                return plan
            rounds.append(plan.statics)

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
                    value = np.asarray(self.values[name])
                    run.shadows[id(tracer)] = (tracer, value, frozenset({name}))
            reads: set[str] = set()
            scope = self._scope({**entry, **arguments}, reads)
            stop, needs = len(nodes), None
            for index in range(self.index, len(nodes)):
                if index in prepared.options.force_breaks:
                    stop, needs = index, forced_break(nodes[index])
                    break
                before = len(run.alarms), set(run.statics), len(lifted), run.traced_nodes
                try:
                    run_node(run, nodes[index], scope)
                except NeedsValue as error:
                    error.__traceback__ = None  # its frames hold tracers and arrays
                    error.__cause__ = error.__context__ = None
                    stop, needs = index, error
                    del run.alarms[before[0] :], lifted[before[2] :]
                    run.taken = {key: None for key in run.taken if key[:2] != (nodes[index].name, nodes[index].operator)}
                    run.statics, run.traced_nodes = before[1], before[3]
                    break
            live = [
                name
                for index in range(self.index, stop)
                for name in nodes[index].outputs
                if name and prepared.last_use.get(name, -1) >= stop
            ]
            results = {name: scope.read(name) for name in live}
            plan = _Plan(
                stop=stop,
                needs=needs,
                reads=reads,
                statics=statics | run.statics,
                lifted=lifted,
                outputs=tuple(name for name in live if has_traced(results[name])),
                host_outputs={name: results[name] for name in live if not has_traced(results[name])},
                alarms=tuple(run.alarms),
                uses_seed=run.used_seed,
                traced_nodes=run.traced_nodes,
                output_trees=[sequence_length(results[name]) for name in live if has_traced(results[name])],
                output_kinds=[
                    (leaf.shape, leaf.dtype)
                    for name in live
                    if has_traced(results[name])
                    for leaf in jax.tree.leaves(results[name])
                ],
                lowerings=tuple(run.taken),
            )

        jax.eval_shape(evaluate, {name: abstract(self.values[name]) for name in traceable}, _SEED)
        assert plan is not None
        return plan

    def _donated(self, plan: _Plan, arguments: Sequence[str]) -> tuple[str, ...]:
        """Arguments whose memory may be reused: those that the caller donates and that nothing reads after this segment.

        In a body that runs on the host there are none: what it reads may be read again in the next iteration, or around it.
        """
        prepared = self.prepared
        if not prepared.options.donate or prepared.path:
            return ()
        last = (
            name
            for name in arguments
            if name in prepared.options.donate
            and name not in prepared.dim_like
            and prepared.last_use.get(name, -1) < plan.stop
        )
        return usable_donations(last, self.values, plan.output_kinds)

    def _program(
        self, plan: _Plan, arguments: Sequence[str], donated: tuple[str, ...], planning: int
    ) -> tuple[Any, Making]:
        nodes = self.prepared.nodes
        _, entry = self._split(plan.statics)
        weights, slots = _distinct(plan.lifted)

        kept = tuple(name for name in arguments if name not in donated)

        def compute(
            given: tuple[Any, ...], values: tuple[Any, ...], seed: Any, consumed: tuple[Any, ...] = ()
        ) -> tuple[tuple[Any, ...], Any]:
            order = iter(slots)

            def lift(array: np.ndarray) -> Any:
                found = given[next(order)]
                assert (found.shape, found.dtype) == (array.shape, array.dtype), "the plan and the trace disagree"
                return found

            run = self._run(seed, lift)
            named = zip((*kept, *donated), (*values, *consumed), strict=True)
            scope = self._scope({**entry, **dict(named)}, set())
            for index in range(self.index, plan.stop):
                run_node(run, nodes[index], scope)
            entered = {id(leaf) for leaf in jax.tree.leaves((given, values, consumed))}
            outputs = tuple(
                # A program's input returned as it is would be the same memory as the caller's.
                jax.tree.map(lambda leaf: jnp.copy(leaf) if id(leaf) in entered else leaf, scope.read(name))
                for name in plan.outputs
            )
            return outputs, run.alarm

        placement = self.prepared.placement
        home = None if placement.mesh is None else placement.home

        def structs(names: Sequence[str]) -> tuple[Any, ...]:
            axes = self.prepared.batch_axes
            return tuple(laid_out(self.values[name], home and placement.argument(axes.get(name))) for name in names)

        began = time.perf_counter_ns()
        try:
            lowered = jax.jit(compute, donate_argnums=(3,) if donated else ()).lower(
                tuple(laid_out(array, home) for array in weights),
                structs(kept),
                laid_out(_SEED, home) if plan.uses_seed else None,
                *((structs(donated),) if donated else ()),
            )
            traced = time.perf_counter_ns()
            program = compile_program(lowered, self.prepared.platform, self.variant.fusions)
            compiled = time.perf_counter_ns()
            making = Making(planning, traced - began, compiled - traced, module_size(lowered))
            return launcher(program, arguments=arguments, donated=donated, mesh=placement.mesh), making
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
            lowerings=self.variant.lowerings,
            prepare=self.prepared.root.rearranged,
            wide=self.prepared.wide,
        )

    def _scope(self, entry: dict[str, Any], reads: set[str]) -> Scope:
        weights = {k: v for k, v in self.prepared.graph.initializers.items() if k not in self.values}
        return Scope(outer=Scope(entry, outer=Scope(weights), reads=reads))

    def _split(self, statics: frozenset[str]) -> tuple[list[str], dict[str, Any]]:
        """Names that are traced, and the entry's other values."""
        traceable, entry = [], {}
        for name in sorted(self.values):
            value = self.values[name]
            if name in statics or name in self.known or value is None:
                entry[name] = np.asarray(value) if isinstance(value, jax.Array) else value
            elif is_traceable(value):
                traceable.append(name)
            else:
                entry[name] = Opaque()
        return traceable, entry

    def _may_be_static(self, name: str) -> bool:
        value = self.values[name]
        return name in self.prepared.dim_like and getattr(value, "dtype", np.dtype(object)).kind in "iub"


def _ready(segment: Segment, disk_cache: str | None) -> SegmentReady:
    return SegmentReady(
        position=segment.position,
        shapes=segment.shapes,
        stop="end" if segment.needs is None else segment.needs.position,
        compiled=segment.program is not None,
        reason=None if segment.needs is None else segment.needs.reason,
        host_values=segment.host_values,
        disk_cache=disk_cache,
    )


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value.copy() if isinstance(value, np.ndarray) else value


def _stand_in(value: Any) -> Any:
    """A value of the same signature without memory of its own."""
    if isinstance(value, list):
        return [_stand_in(item) for item in value]
    if isinstance(value, (np.ndarray, jax.Array)):
        return np.broadcast_to(np.zeros((), value.dtype), value.shape)
    return value


def forced_break(node: Node) -> NeedsValue:
    """The reason of a break that `Options.force_breaks` asks for."""
    return NeedsValue(
        node=node.name,
        operator=node.operator,
        position=node.position,
        value=next(filter(None, node.inputs), ""),
        producer=None,
        reason="a forced break",
        hint="Compile without force_breaks.",
    )


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
