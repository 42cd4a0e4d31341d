"""Follow named axes through a graph, to prove that padding, or stacking rows, changes no result.

Two kinds of dimension are followed. A *batch* dimension holds independent rows: row i of every result must come from row
i of the inputs alone. A *padded* dimension may be longer than the data: the front part of every result, as long as the
data, must be what the graph gives without padding. What holds for each value is carried along:

- `Tensor.axes`: each axis as a product of atoms, so that a Reshape may merge and split axes; an atom is a followed
  dimension or a plain size.
- the `State` of each followed atom: what stands beyond the true length. A constant (the padding itself and what is
  computed from it alone), a masked score, garbage (finite), or wild (it may hold NaN).
- sizes are polynomials of the dimensions (`Sizes`), so that shape arithmetic is exact, never a sample.
- a taint: the value was computed from the padded size, or from a row's place in the batch. It may be used as a size or
  be dropped, but must not reach an output.

A rule for each operator says how these go through it: `axes_rules` (elementwise), `axes_products`, `axes_norms`, `axes_moves`,
`axes_index`, `axes_windows`, `axes_attention`, `axes_control`. An operator that mixes is named by a `Mixes`; one without a rule is
refused as soon as it meets a followed axis. Beside the axes go three questions about values: of which kind they are
(`axes_kinds`), between which bounds they lie (`axes_spans`), and whether a mask leaves data alone (`axes_live`). `axes_proof`
walks the graph and judges; `axes_rewrite` writes the nodes that a padded graph needs. What is assumed, and documented:
arithmetic that is finite on data is finite on what the graph computes from padding, and scores stay below 4 900 in magnitude
where a mask adds -10 000.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from transmuter_async.compiler.axes_kinds import kind_of, result_kind
from transmuter_async.compiler.axes_live import UNKNOWN, lets_go
from transmuter_async.compiler.axes_spans import kind_of_dtype
from transmuter_async.compiler.axes_values import (
    GARBAGE,
    JUDGES,
    LARGE,
    NAN,
    POISON,
    WILD,
    Atom,
    Axis,
    Dim,
    Mask,
    Mixes,
    Mixing,
    Poison,
    State,
    Tensor,
    Undecided,
    constant,
    everywhere,
    is_unit,
    labels,
    merged,
    plain,
    size_of,
    within,
)
from transmuter_async.compiler.run import Run, Scope
from transmuter_async.compiler.sizes import Bounds, Poly, Sizes, compute_sizes, object_array, poly
from transmuter_async.compiler.trace import run_node
from transmuter_async.errors import TransmuterError
from transmuter_async.graph import Graph, Node, TensorType
from transmuter_async.operators import resolve

__all__ = [
    "GARBAGE",
    "JUDGES",
    "LARGE",
    "NAN",
    "WILD",
    "Atom",
    "Axis",
    "Dim",
    "Follower",
    "Mask",
    "Mixes",
    "Mixing",
    "Rule",
    "State",
    "Tensor",
    "Undecided",
    "constant",
    "declared",
    "everywhere",
    "is_unit",
    "labels",
    "merged",
    "plain",
    "size_of",
    "within",
]

Rule = Callable[["Follower", Node, list[Any]], list[Any]]


class Follower:
    """One walk over a graph.

    Attributes:
        dims: The followed dimensions by name.
        mixes: What was found, in graph order.
        bounds: What is known of the symbols' values.
        undecided: Whether a branch was followed whose condition only a call's sizes decide.
        crossed: Whether something that may be a mask changes along two padded axes (a causal one): a row may then have no
            unmasked position, although its mask has.
        unmasked: Inputs of which each row must hold something else than padding for the proof; True: at its front.
        lengths: Inputs of which no element may be above the size of a dimension for the proof.
        ones: Inputs of which each row must hold a 1 for the proof: a mask whose ones are counted.
        along: The dimension whose state a rule is about to settle.
        put_back: Inputs whose padding has to be put back to a value before a node reads it, by output and axis.
        born: Dimensions by the name of the integer, made inside of the graph, that is their size.
        atmost: Names of integers of which none is above the size of such a dimension: it is their maximum.
        unborn: Such dimensions that turned out not to be one, and why.
        watched: Whether an alarm rings for NaN and infinity, those on padding included.
    """

    def __init__(
        self,
        dims: Iterable[Dim] = (),
        rules: Mapping[tuple[str, str], Rule] | None = None,
        *,
        born: Mapping[str, str] | None = None,
        atmost: Mapping[str, str] | None = None,
        watched: bool = False,
    ) -> None:
        from transmuter_async.compiler.axes_attention import ATTENTION
        from transmuter_async.compiler.axes_control import CONTROL
        from transmuter_async.compiler.axes_index import INDEX
        from transmuter_async.compiler.axes_moves import MOVES
        from transmuter_async.compiler.axes_norms import NORMS
        from transmuter_async.compiler.axes_products import PRODUCTS
        from transmuter_async.compiler.axes_rules import RULES
        from transmuter_async.compiler.axes_windows import WINDOWS

        self.dims = {dim.name: dim for dim in dims}
        self.rules: dict[tuple[str, str], Rule] = {
            **RULES,
            **NORMS,
            **PRODUCTS,
            **MOVES,
            **INDEX,
            **WINDOWS,
            **CONTROL,
            **ATTENTION,
            **(rules or {}),
        }
        self.mixes: list[Mixes] = []
        self.born = dict(born or {})
        self.atmost = dict(atmost or {})
        self.watched = watched
        self.bounds = Bounds(
            {dim.name: dim.largest for dim in self.dims.values()}, empty=self.dims if self.born else ()
        )
        self.put_back: dict[tuple[str, int], Mask] = {}
        self.unborn: dict[str, str] = {}
        self.unmasked: dict[str, bool] = {}
        self.lengths: dict[str, str] = {}
        self.ones: frozenset[str] = frozenset()
        self.along = ""
        self.undecided = False
        self.crossed = False
        self.values: dict[str, Any] = {}
        self.initializers: list[Mapping[str, np.ndarray]] = []
        self._fresh = 0
        self.node: Node | None = None

    # What rules ask for.

    def kind(self, dim: str) -> str:
        """Either "batch" or "padded"."""
        return self.dims[dim].kind

    def batch(self, axes: Iterable[Axis]) -> str | None:
        """A batch dimension among some axes."""
        return next((name for name in sorted(labels(axes)) if self.kind(name) == "batch"), None)

    def padded(self, axes: Iterable[Axis]) -> str | None:
        """A padded dimension among some axes."""
        return next((name for name in sorted(labels(axes)) if self.kind(name) == "padded"), None)

    def fresh(self, why: str = "size") -> Poly:
        """A size that nothing is known of, the same with and without padding."""
        self._fresh += 1
        return Poly.symbol(f"{why}?{self._fresh}")

    def tensor(self, value: Any) -> Tensor:
        """Any value as a tensor."""
        if isinstance(value, Tensor):
            return value
        if isinstance(value, Sizes):
            found = sorted(value.symbols() & self.dims.keys())
            taint = None
            if found:
                taint = Mixes(self._name(), self._op(), found[0], "computes with the size, which padding changes")
            return Tensor(tuple(plain(n) for n in value.values.shape), taint=taint, fed=False, kind=kind_of(value))
        if isinstance(value, np.ndarray):
            return Tensor(tuple(plain(n) for n in value.shape), fed=False, kind=kind_of(value))
        return Tensor(None)

    def ranked(self, value: Any) -> tuple[Axis, ...]:
        """The axes of a value; `Undecided` where the rank is not known."""
        axes = self.tensor(value).axes
        if axes is None:
            raise Undecided("the rank of an input is not known")
        return axes

    def as_data(self, tensor: Tensor) -> Tensor:
        """The tensor as operands see it: a row's place in its batch, computed with, is a taint."""
        content = tensor.content
        if content is not None and tensor.taint is None:
            held = content[1] if content[0] == "columns" else (content[1],) if content[0] == "iota" else ()
            for dim in held:
                if dim is not None and self.kind(dim) == "batch":
                    why = "computes with a row's place in the batch"
                    return replace(tensor, content=None, taint=Mixes(self._name(), self._op(), dim, why))
        return replace(tensor, content=None)

    @property
    def rows_only(self) -> frozenset[str]:
        """Dimensions whose spare rows are copies of true ones, so that what they compute is never out of range."""
        return frozenset(dim.name for dim in self.dims.values() if dim.kind == "batch")

    def varying(self, tensor: Tensor) -> int:
        """Along how many padded axes the values change."""
        atoms = [atom for axis in tensor.axes or () for atom in axis if atom.dim is not None and not atom.level]
        return sum(self.kind(str(atom.dim)) == "padded" for atom in atoms)

    def rely_on(self, atom: Atom) -> None:
        """A mask hides an atom's padding only beside something unmasked, unless it is -inf: then both give NaN."""
        state = atom.state
        if np.isneginf(state.value):
            return
        if not state.source:
            raise Mixing(str(atom.dim), "its mask is not made from an input, so that a row may be masked everywhere")
        one, other = state.live or (UNKNOWN, UNKNOWN)
        if not lets_go(one) and not lets_go(other):
            raise Mixing(
                str(atom.dim),
                f"its mask may hide data as well, and is finite: where {', '.join(map(repr, sorted(state.source)))} holds a 1 it is not "
                "known to let go (an input of floats is a mask where mask= names it)",
            )
        if not lets_go(other):
            self.ones |= state.source
        for name in state.source:  # of several, all have to hold data at one and the same place: at the front
            self.unmasked[name] = self.unmasked.get(name, False) or not state.flat or len(state.source) > 1

    def mask(self, node: Node, dim: str, axis: int, rank: int, factor: Poly, fill: str) -> None:
        """Ask for the padding of a node's first input to be put back to a value, by nodes before it.

        Raises:
            Mixing: The node is in a body, where none are put.
        """
        if self.watched and fill == "-inf":
            raise Mixing(
                dim,
                "its windows reach into the padding, and the minus infinity put there would ring the alarm of nonfinite=",
            )
        times = factor.constant()
        if len(self.initializers) > 1 or times is None:
            raise Mixing(dim, "its windows reach into the padding, which is only masked outside of bodies")
        self.put_back[node.outputs[0], axis] = Mask(
            node.name, node.op_type, node.outputs[0], axis, rank, dim, times, fill
        )

    def bear(self, name: str, value: Any) -> Any:
        """The size that bears a dimension, once it is made: from here on it is the padded one."""
        label = self.born[name]
        tensor = self.tensor(value)
        if isinstance(value, Sizes) and value.symbols() & self.dims.keys() or tensor.taint is not None:
            axis = tensor.taint.axis if tensor.taint is not None else label
            raise Mixing(axis, f"the size {name!r} is computed from a size that padding changes")
        if isinstance(value, np.ndarray):
            self.unborn[label] = f"{name!r} is always {value.reshape(-1)[:4].tolist()}"
        elif tensor.axes is None or len(tensor.axes) > 1 or not all(map(is_unit, tensor.axes)) or tensor.kind != "i":
            self.unborn[label] = f"{name!r} is not known to be one integer"
        else:
            shape = (1,) * len(tensor.axes)
            return Sizes(object_array([Poly.symbol(label)], shape))
        return value

    def marked(self) -> tuple[Any, ...]:
        """What a walk has found so far; `back_to` forgets what came after."""
        return (
            list(self.mixes),
            dict(self.unmasked),
            dict(self.lengths),
            dict(self.put_back),
            self.ones,
            self.undecided,
            self.crossed,
        )

    def back_to(self, mark: tuple[Any, ...]) -> None:
        """Forget what a walk found since `marked`."""
        mixes, self.unmasked, self.lengths, self.put_back, self.ones, self.undecided, self.crossed = mark
        self.mixes[:] = mixes

    def positions(self, node: Node, tensor: Tensor) -> Tensor:
        """The result of a NonZero of something that is not followed."""
        rank = None if tensor.axes is None else len(tensor.axes)
        return Tensor((plain(self.fresh() if rank is None else rank), plain(self.fresh("count"))))

    def select(self, tensor: Tensor, index: Tensor) -> Tensor:
        """Rows at the positions of a NonZero; only `dense` makes such indices."""
        raise Undecided("positions of a NonZero are not followed here")

    def put(self, node: Node, tensor: Tensor, index: Tensor, updates: Tensor) -> Tensor:
        """Rows written to the positions of a NonZero; only `dense` makes such indices."""
        raise Undecided("positions of a NonZero are not followed here")

    def sizes(self, value: Any) -> list[Poly] | None:
        """The elements of a shape-like value, None where they are not known."""
        if isinstance(value, Sizes):
            return [poly(v) for v in value.values.reshape(-1)]
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
            return [poly(int(v)) for v in value.reshape(-1)]
        return None

    def evaluate(self, node: Node, scalars: Sequence[Any]) -> Any:
        """The node's operator on known scalars; None where it refuses them."""
        names = tuple("" if value is None else f"i{index}" for index, value in enumerate(scalars))
        small = replace(node, inputs=names, outputs=("out",))
        scope = Scope({f"i{index}": np.asarray(value) for index, value in enumerate(scalars) if value is not None})
        try:
            run_node(Run(tracing=False, bounds="clamp"), small, scope)
        except TransmuterError:
            return None
        out = scope.values["out"]
        return out.reshape(()) if isinstance(out, np.ndarray) and out.size == 1 else None

    def _name(self) -> str:
        return "" if self.node is None else self.node.name

    def _op(self) -> str:
        return "" if self.node is None else self.node.op_type

    # The walk.

    def follow(self, graph: Graph, inputs: Mapping[str, Any]) -> None:
        """Walk a graph. `inputs` gives the value of each graph input; initializers are known."""
        self.values.update(inputs)
        self.run(graph)

    def run(self, graph: Graph) -> None:
        """Walk the nodes of a graph or body whose inputs are set."""
        self.initializers.append(graph.initializers)
        try:
            for node in graph.nodes:
                self._step(node)
        finally:
            self.initializers.pop()

    def read(self, name: str) -> Any:
        """The value of a name, initializers of the graphs around included."""
        if name in self.values:
            return self.values[name]
        for held in reversed(self.initializers):
            if name in held:
                return held[name]
        return Tensor(None)

    def _step(self, node: Node) -> None:
        values = [self.read(name) if name else None for name in node.inputs]
        outer = [self.read(name) for graph in node.subgraphs() for name in graph.outer_names()]
        before, self.node = self.node, node
        try:
            results = self._outputs(node, values, outer)
        except Mixing as error:
            found = Mixes(node.name, node.op_type, error.axis, error.why)
            if found not in self.mixes:
                self.mixes.append(found)
            results = [POISON] * len(node.outputs) if error.result is None else error.result
        finally:
            self.node = before
        for at, (name, value) in enumerate(zip(node.outputs, results, strict=False)):
            if name:
                if isinstance(value, Tensor):
                    value = replace(value, kind=result_kind(node, at, values, value.kind))
                    if name in self.atmost and value.content is None:
                        value = replace(value, content=("atmost", self.atmost[name], "", frozenset()))
                    self._hold_finite(node, value)
                if name in self.born and not isinstance(value, Poison):
                    value = self._born(node, name, value)
                self.values[name] = value
                if isinstance(value, Tensor) and (not value.fed or node.op_type in JUDGES) and self.varying(value) > 1:
                    self.crossed = True

    def _born(self, node: Node, name: str, value: Any) -> Any:
        try:
            return self.bear(name, value)
        except Mixing as error:
            self.mixes.append(Mixes(node.name, node.op_type, error.axis, error.why))
            return POISON

    def _hold_finite(self, node: Node, value: Tensor) -> None:
        """Where an alarm watches for NaN and infinity, padding must not ring it."""
        if not self.watched:
            return
        for axis in value.axes or ():
            for atom in axis:
                if atom.dim is None or self.kind(atom.dim) == "batch" or atom.state.finite:
                    continue
                if (
                    atom.state.kind == "masked"
                    and np.isfinite(atom.state.value)
                    and not 3e4 < -atom.state.value <= 65504
                ):
                    if abs(atom.state.value) < 1e38:
                        continue
                why = "padding may make it NaN or infinite, which nonfinite= would take for an error of the data"
                found = Mixes(node.name, node.op_type, atom.dim, why)
                if found not in self.mixes:
                    self.mixes.append(found)

    def _outputs(self, node: Node, values: list[Any], outer: list[Any]) -> list[Any]:
        if any(isinstance(value, Poison) for value in (*values, *outer)):
            return [POISON] * len(node.outputs)
        if not outer and not any(True for _ in node.subgraphs()) and all(_known(v) for v in values):
            folded = self._fold(node, values)
            if folded is not None:
                return folded
        if any(isinstance(v, Sizes) for v in values) and all(
            v is None or isinstance(v, (Sizes, np.ndarray)) for v in values
        ):
            computed = compute_sizes(node, values, self.bounds)
            if computed is not None:
                return [self._settled(computed)]
        carried = self._carried([*values, *outer])
        rule = self.rules.get((node.domain, node.op_type))
        if rule is None:
            if carried is not None:
                raise Mixing(carried, "nothing is known about how this operator treats the axis")
            return [Tensor(None) for _ in node.outputs]
        try:
            return rule(self, node, values)
        except Undecided as error:
            if carried is not None:
                self.undecided = True
                raise Mixing(carried, str(error)) from None
            return [Tensor(None) for _ in node.outputs]
        except (IndexError, ValueError, TypeError) as error:  # a node that the model's own run would refuse
            if carried is not None:
                raise Mixing(carried, f"the shapes do not fit what the operator takes ({error})") from None
            return [Tensor(None) for _ in node.outputs]

    def _carried(self, values: Iterable[Any]) -> str | None:
        """A followed dimension that a node meets, by axis, by size or by taint."""
        for value in values:
            if isinstance(value, Tensor):
                if value.dims:
                    return min(value.dims)
                if value.taint is not None:
                    return value.taint.axis
            if isinstance(value, Sizes) and value.symbols() & self.dims.keys():
                return min(value.symbols() & self.dims.keys())
        return None

    def _settled(self, value: Any) -> Any:
        """Sizes that are all plain numbers are a known array."""
        if isinstance(value, Sizes):
            known = value.known()
            return value if known is None else known
        return value

    def _fold(self, node: Node, values: list[Any]) -> list[Any] | None:
        definition = resolve(node.domain, node.op_type, node.opset)
        if definition is None or definition.random or not _small(node, values):
            return None
        names = tuple("" if value is None else f"i{index}" for index, value in enumerate(values))
        scope = Scope({f"i{index}": value for index, value in enumerate(values) if value is not None})
        try:
            run_node(Run(tracing=False), replace(node, inputs=names), scope)
        except TransmuterError:
            return None
        results = [scope.values.get(name) for name in node.outputs]
        if all(isinstance(value, np.ndarray) or not name for name, value in zip(node.outputs, results, strict=True)):
            return results
        return None


def _small(node: Node, values: list[Any]) -> bool:
    """Whether a node of known inputs is cheap to compute."""
    count = sum(value.size for value in values if value is not None)
    if node.op_type == "ConstantOfShape":
        count = math.prod(int(n) for n in values[0].reshape(-1))
    elif node.op_type in ("Expand", "Tile"):
        count *= math.prod(int(n) for n in values[1].reshape(-1))
    elif node.op_type == "Range":
        start, limit, delta = (float(v.reshape(())) for v in values)
        count = math.inf if delta == 0 else abs((limit - start) / delta)
    return bool(count <= LARGE)


def _known(value: Any) -> bool:
    return value is None or isinstance(value, np.ndarray)


def declared(value_type: Any, names: Sequence[Poly | Atom | None], fresh: Callable[[str], Poly]) -> Tensor:
    """A graph input as a tensor: an atom or a size for each axis, None where the declared type tells."""
    if not isinstance(value_type, TensorType) or value_type.shape is None:
        return Tensor(None, kind=kind_of_dtype(value_type.dtype) if isinstance(value_type, TensorType) else "")
    axes: list[Axis] = []
    for dim, given in zip(value_type.shape, names, strict=True):
        if isinstance(given, Atom):
            axes.append((given,))
        elif given is not None:
            axes.append(plain(given))
        elif isinstance(dim, int) and dim >= 0:
            axes.append(plain(dim))
        else:
            axes.append(plain(Poly.symbol(dim) if isinstance(dim, str) else fresh("input")))
    return Tensor(tuple(axes), kind=kind_of_dtype(value_type.dtype))
