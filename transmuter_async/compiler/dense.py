"""Masked select and scatter made dense: work on the rows that a mask selects becomes work on all rows.

    NonZero(M) -> GatherND(X) ... row by row ... -> ScatterND(base)    becomes    all rows ... -> Where(M, rows, base)

NonZero's output shape depends on values: the graph breaks there, and what follows compiles anew for each number of
selected rows. The dense form has neither. It is applied where following the axes proves (see `axes`; the selected rows
are a batch dimension) that each row is worked on by itself, that nothing of the region but its ScatterND leaves it, that
the number of rows is used as a size only, and that M, the tensors gathered from and the ones written to have the same
leading sizes. NonZero lists distinct positions, so Where picks exactly the rows that ScatterND wrote.

Rows that M does not select get the first selected one instead, so that no index is out of range and no NaN arises that
the graph would not have; where M selects none, indices inside the region are zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from transmuter_async.compiler.axes import Atom, Dim, Follower, Mixing, Tensor, declared, plain, size_of
from transmuter_async.compiler.sizes import Poly
from transmuter_async.compiler.writer import Writer
from transmuter_async.graph import Graph, Node

__all__ = ["densify", "rewritten"]

MARK = "@first selected"
_BOOL, _INT32 = 9, 6
_INDEX = {"Gather": 1, "GatherElements": 1, "GatherND": 1, "ScatterND": 1, "ScatterElements": 1}
_BEYOND = (
    ("", "Loop"),
    ("", "Scan"),
    ("com.microsoft", "EmbedLayerNormalization"),
    ("com.microsoft", "GroupQueryAttention"),
)
"""Operators whose look-ups, or those of their bodies, can't be given other indices where a mask selects nothing."""


def rewritten(graph: Graph) -> tuple[str, ...]:
    """Names of the NonZero nodes that `densify` removed from a graph."""
    marked = (node.name.removesuffix(MARK) for node in graph.nodes if node.name.endswith(MARK))
    return tuple(name for names in marked for name in names.split(", "))


def densify(graph: Graph) -> Graph:
    """The graph without those NonZero nodes whose regions can be proved to work row by row."""
    candidates = {node.outputs[0]: node for node in graph.nodes if _is_candidate(node)}
    refused: set[str] = set()
    while candidates.keys() - refused:
        follower = _Selections(candidates.keys() - refused)
        inputs = {
            value.name: declared(value.type, [None] * _rank(value.type), follower.fresh) for value in graph.inputs
        }
        follower.follow(graph, inputs)
        bad = {each.axis for each in follower.mixes} | _escaped(follower, graph)
        bad |= {
            name for name, region in follower.regions.items() if not all(_only_indexes(graph, n) for n in region.names)
        }
        lost = {name for dim in bad & follower.regions.keys() for name in follower.regions[dim].names}
        lost = lost or candidates.keys() - refused - {n for region in follower.regions.values() for n in region.names}
        if not lost:
            return _rewrite(graph, follower)
        refused |= lost
    return graph


def _is_candidate(node: Node) -> bool:
    return node.op_type == "NonZero" and not node.domain


def _rank(value_type: Any) -> int:
    shape = getattr(value_type, "shape", None)
    return 0 if shape is None else len(shape)


@dataclass(slots=True)
class _Region:
    node: Node
    mask: Tensor
    names: list[str]
    labels: list[str]
    gathers: list[Node] = field(default_factory=list)
    scatters: list[Node] = field(default_factory=list)
    lookups: list[Node] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return len(self.mask.axes or ())


class _Selections(Follower):
    """Follows the rows that each NonZero selects as a batch dimension, named by its output. Equal masks select the same."""

    def __init__(self, wanted: Iterable[str]) -> None:
        super().__init__()
        for name in _BEYOND:
            del self.rules[name]
        self.wanted = frozenset(wanted)
        self.regions: dict[str, _Region] = {}
        self.masks: dict[str, str] = {}  # the region by name of its mask
        self.same: dict[str, str] = {}  # an Expand to the size that a tensor has
        self.rests: dict[str, int] = {}  # by node name: axes of a row

    def positions(self, node: Node, tensor: Tensor) -> Tensor:
        """The positions of a mask: a new dimension."""
        name = node.outputs[0]
        if name not in self.wanted or not tensor.axes:
            return super().positions(node, tensor)
        mask = self.same.get(node.inputs[0], node.inputs[0])
        if mask in self.masks:
            first = self.masks[mask]
            self.regions[first].names.append(name)
            self.regions[first].labels.append(node.name)
            name = first
        else:
            self.masks[mask] = name
            self.dims[name] = Dim(name, "batch")
            self.regions[name] = _Region(node, tensor, [name], [node.name])
        return Tensor((plain(len(tensor.axes)), (Atom(Poly.symbol(name), name),)), ("selected", name, False))

    def select(self, tensor: Tensor, index: Tensor) -> Tensor:
        """GatherND: the selected rows of a tensor that has the mask's leading sizes."""
        name, region = self._region(index)
        axes = self._leading(name, region, tensor)
        assert self.node is not None
        region.gathers.append(self.node)
        self.rests[self.node.outputs[0]] = len(axes)
        return Tensor(((Atom(Poly.symbol(name), name),), *axes), None, tensor.taint)

    def put(self, node: Node, tensor: Tensor, index: Tensor, updates: Tensor) -> Tensor:
        """ScatterND: rows of the region, to the same positions."""
        name, region = self._region(index)
        axes = self._leading(name, region, tensor)
        written = self.ranked(updates)
        rows = written[0] if written else plain(1)
        if node.attributes.get("reduction", "none") != "none" or [(a.dim, a.size) for a in rows] != [
            (name, Poly.symbol(name))
        ]:
            raise Mixing(name, "it writes something else than one row for each selected position")
        if updates.dims != {name} or len(written) != len(axes) + 1:
            raise Mixing(name, "it writes rows of another shape")
        region.scatters.append(node)
        self.rests[node.outputs[0]] = len(axes)
        return Tensor(tensor.axes, None, tensor.taint or updates.taint)

    def _region(self, index: Tensor) -> tuple[str, _Region]:
        assert index.content is not None
        _, name, flipped = index.content
        if not flipped:
            raise Mixing(name, "it takes the positions as columns")
        return name, self.regions[name]

    def _leading(self, name: str, region: _Region, tensor: Tensor) -> Sequence[Any]:
        axes = self.ranked(tensor)
        mask = region.mask.axes or ()
        if tensor.dims or [size_of(a) for a in axes[: region.rank]] != [size_of(a) for a in mask]:
            raise Mixing(name, "its leading sizes are not those of the mask")
        return axes[region.rank :]

    def _outputs(self, node: Node, values: list[Any], outer: list[Any]) -> list[Any]:
        at = _INDEX.get(node.op_type)
        if at is not None and not node.domain and len(values) > at:
            index, data = values[at], values[0]
            if isinstance(index, Tensor) and (index.content is None or index.content[0] != "selected") and index.fed:
                touched = index.dims | (data.dims if isinstance(data, Tensor) else frozenset())
                for name in touched & self.regions.keys():
                    self.regions[name].lookups.append(node)
        found = super()._outputs(node, values, outer)
        if node.op_type == "Expand" and isinstance(found[0], Tensor) and isinstance(values[0], Tensor):
            before, after = values[0].axes, found[0].axes
            if before is not None and after is not None and list(map(size_of, before)) == list(map(size_of, after)):
                self.same[node.outputs[0]] = self.same.get(node.inputs[0], node.inputs[0])
        return found


def _escaped(follower: _Selections, graph: Graph) -> set[str]:
    """Dimensions that reach an output, by axis, size or taint."""
    found: set[str] = set()
    for value in graph.outputs:
        tensor = follower.as_data(follower.tensor(follower.read(value.name)))
        found |= tensor.dims
        if tensor.taint is not None:
            found.add(tensor.taint.axis)
    return found


def _only_indexes(graph: Graph, name: str) -> bool:
    """Whether positions are read, turned, as indices of GatherND and ScatterND only, beside their shape."""
    turned = {name}
    given = {value.name for value in graph.outputs}
    for node in graph.nodes:
        if any(turned & inner.outer_names() for inner in node.subgraphs()):
            return False
        if not turned & set(node.inputs):
            continue
        if node.op_type == "Transpose" and not node.domain:
            turned.add(node.outputs[0])
        elif node.op_type == "Shape" and not node.domain:
            continue
        elif node.op_type not in ("GatherND", "ScatterND") or any(
            n in turned for i, n in enumerate(node.inputs) if i != 1
        ):
            return False
    return not turned & given


# --- rewriting --------------------------------------------------------------------------------------------------------


def _rewrite(graph: Graph, follower: _Selections) -> Graph:
    constants: dict[str, np.ndarray] = {}
    nodes: list[Node] = []
    gathers = {node.outputs[0]: region for region in follower.regions.values() for node in region.gathers}
    scatters = {node.outputs[0]: region for region in follower.regions.values() for node in region.scatters}
    owners = {name: region for region in follower.regions.values() for name in region.names}
    lookups: dict[str, list[_Region]] = {}
    for region in follower.regions.values():
        for node in region.lookups:
            lookups.setdefault(node.outputs[0], []).append(region)
    for node in graph.nodes:
        writer = Writer(node, constants)
        out = node.outputs[0] if node.outputs else ""
        if node.op_type == "NonZero" and out in owners:
            region = owners[out]
            if out == region.node.outputs[0]:
                _mask(writer, region)
            # Only its shape is read any more.
            shape = writer.add(
                "Concat", [writer.constant([region.rank]), f"{region.node.outputs[0]}@size"], f"{out}@shape", axis=0
            )
            writer.add("Expand", [writer.constant(0), shape], out)
        elif out in gathers:
            _gather(writer, gathers[out], node)
        elif out in scatters:
            _scatter(writer, scatters[out], node, follower.rests[out])
        else:
            nodes.append(_safe(writer, node, lookups[out]) if out in lookups else node)
            nodes[-1:-1] = writer.nodes
            continue
        nodes.extend(writer.nodes)
    return replace(graph, nodes=tuple(nodes), initializers={**graph.initializers, **constants})


def _mask(writer: Writer, region: _Region) -> None:
    """What all of a region's nodes share: the mask as booleans, its rows, and for each row the one to work on."""
    node = region.node
    base = node.outputs[0]
    mask = writer.add("Cast", [node.inputs[0]], f"{base}@mask", to=_BOOL)
    flat = writer.add("Reshape", [mask, writer.constant([-1])], f"{base}@flat")
    numbers = writer.add("Cast", [flat], f"{base}@numbers", to=_INT32)
    # One more that is false: an empty mask has a largest element then, and no row is looked up.
    more = writer.add("Concat", [numbers, writer.constant([0], np.int32)], f"{base}@more", axis=0)
    first = writer.add("ArgMax", [more], f"{base}@first", named=", ".join(region.labels) + MARK, axis=0, keepdims=1)
    size = writer.add("Shape", [flat], f"{base}@size")
    count = writer.add("Squeeze", [size, writer.constant([0])], f"{base}@count")
    places = writer.add("Range", [writer.constant(0), count, writer.constant(1)], f"{base}@places")
    writer.add("Where", [flat, places, first], f"{base}@rows")
    some = writer.add("ReduceMax", [more, writer.constant([0])], f"{base}@some", keepdims=0)
    writer.add("Cast", [some], f"{base}@any", to=_BOOL)


def _gather(writer: Writer, region: _Region, node: Node) -> None:
    base, out = region.node.outputs[0], node.outputs[0]
    rest = writer.add("Shape", [node.inputs[0]], f"{out}@rest", start=region.rank)
    shape = writer.add("Concat", [f"{base}@size", rest], f"{out}@shape", axis=0)
    rows = writer.add("Reshape", [node.inputs[0], shape], f"{out}@all", allowzero=1)
    writer.add("Gather", [rows, f"{base}@rows"], out, axis=0)


def _scatter(writer: Writer, region: _Region, node: Node, rest: int) -> None:
    base, out = region.node.outputs[0], node.outputs[0]
    held, _, updates = node.inputs
    shape = writer.add("Shape", [held], f"{out}@shape")
    rows = writer.add("Reshape", [updates, shape], f"{out}@all", allowzero=1)
    mask = f"{base}@mask"
    if rest:
        axes = writer.constant(list(range(region.rank, region.rank + rest)))
        mask = writer.add("Unsqueeze", [mask, axes], f"{out}@mask")
    writer.add("Where", [mask, rows, held], out)


def _safe(writer: Writer, node: Node, regions: Sequence[_Region]) -> Node:
    """The node with its indices zero where its region selects nothing: their rows are never used."""
    at = _INDEX[node.op_type]
    index = node.inputs[at]
    for region in regions:
        zero = writer.add("CastLike", [writer.constant(0), index], f"{node.outputs[0]}@zero{len(writer.nodes)}")
        chosen = f"{node.outputs[0]}@index{len(writer.nodes)}"
        index = writer.add("Where", [f"{region.node.outputs[0]}@any", index, zero], chosen)
    return replace(node, inputs=(*node.inputs[:at], index, *node.inputs[at + 1 :]))
