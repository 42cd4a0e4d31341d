"""Raw values -> the final graph: sorted, every name defined once, functions expanded, opsets settled per node.

Names. The top-level graph keeps the names of the file. A subgraph keeps its names too, unless one hides a name of a graph
around it; then the inner one is renamed, so that after reading no name hides another. Names inside of an expanded function
are always new: `"call/inner"`, with a number where that is taken.

Paths. Nodes are numbered in the sorted graph of the *file*; nodes of a subgraph or a function body have one entry more.
Where a node has several subgraphs the numbering runs on from one to the next, so that no two nodes share a path.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..errors import InvalidModel
from .budget import Budget
from .decode import RawFunction, RawGraph, RawNode, Reference
from .model import Graph, Node, Value

__all__ = ["Expander", "Standard"]


class Standard(Protocol):
    """What the ONNX standard says about operators: function bodies, and types where a body depends on them."""

    def body(self, node: Node, graphs: Mapping[str, RawGraph]) -> RawFunction | None:
        """The function body of an operator for this very node, None where it has none or its input types are unknown."""
        ...

    def declare(self, values: Iterable[Value], initializers: Mapping[str, np.ndarray]) -> None:
        """Notes the types of names that are about to be used."""
        ...

    def infer(self, node: Node) -> None:
        """Notes the types of the node's outputs, as far as they follow from its inputs."""
        ...


@dataclass(slots=True, eq=False)
class _Scope:
    """Names that are visible to nodes: name in the file or function -> final name."""

    names: dict[str, str]
    parent: _Scope | None
    imports: Mapping[str, int]
    bindings: Mapping[str, object] | None
    depth: int
    prefix: str | None
    where: str

    def find(self, name: str) -> str | None:
        scope: _Scope | None = self
        while scope is not None:
            final = scope.names.get(name)
            if final is not None:
                return final
            scope = scope.parent
        return None


class Expander:
    """Builds the final graph of one model.

    Args:
        functions: The model's own functions by (domain, name, overload), decoded on demand.
        standard: See `Standard`.
        known: Tells whether an operator (domain, name, opset) has a definition and need not be expanded.
        opsets: The model's imports.
        ir_version: Decides what an initializer that is also an input means.
        budget: Limits.
        source: The model, as errors call it.
    """

    def __init__(
        self,
        functions: Mapping[tuple[str, str, str], Callable[[], RawFunction]],
        standard: Standard,
        known: Callable[[str, str, int], bool],
        opsets: Mapping[str, int],
        ir_version: int,
        budget: Budget,
        source: str | None,
    ) -> None:
        self._functions = functions
        self._standard = standard
        self._known = known
        self._opsets = opsets
        self._overrides = ir_version >= 4
        self._budget = budget
        self._source = source
        self._taken: set[str] = set()
        self._numbers: dict[tuple[int, ...], int] = {}
        self._outer: dict[int, tuple[RawGraph, frozenset[str]]] = {}  # holds the graph: an id alone may be used again
        self._stack: list[tuple[str, str, str]] = []
        self._count = 0
        self.expanded = 0

    def _bad(self, text: str) -> InvalidModel:
        return InvalidModel(text, source=self._source)

    def run(self, raw: RawGraph) -> Graph:
        """The final top-level graph.

        Raises:
            InvalidModel: Undefined or repeated names, cycles, recursion, missing imports, over budget.
        """
        _collect_names(raw, self._taken)
        if not raw.outputs:
            raise self._bad(f"graph {raw.name!r} has no outputs, so there is nothing to compute")
        names = [value.name for value in raw.outputs]
        repeated = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
        if repeated:
            raise self._bad(f"graph {raw.name!r} lists outputs twice: {sorted(repeated)}")
        return self._graph(raw, None, (), 0, self._opsets, None)

    def _graph(
        self,
        raw: RawGraph,
        parent: _Scope | None,
        path: tuple[int, ...],
        depth: int,
        imports: Mapping[str, int],
        bindings: Mapping[str, object] | None,
    ) -> Graph:
        where = f"graph {raw.name!r}"
        if depth > self._budget.nesting:
            raise self._bad(f"{where}: graphs and functions are nested more than {self._budget.nesting} deep")
        declared = [value.name for value in raw.inputs]
        both = [name for name in declared if name in raw.initializers]
        initializers = dict(raw.initializers)
        if parent is not None:  # the node around a subgraph always passes its inputs
            for name in both:
                del initializers[name]
            both = []
        defined = self._definitions(where, declared, initializers, set(both), raw.nodes)
        prefix = None if parent is None else parent.prefix
        scope = _Scope({}, parent, imports, bindings, depth, prefix, where)
        for name in defined:
            hidden = parent is not None and (prefix is not None or parent.find(name) is not None)
            scope.names[name] = self._fresh(name if prefix is None else f"{prefix}/{name}") if hidden else name
        local = scope.names
        values = tuple(Value(local[value.name], value.type) for value in raw.inputs if value.name not in both)
        types = {local[name]: declared_type for name, declared_type in raw.types.items() if name in local}
        # an input that a call may leave out is declared nowhere else
        types |= {value.name: value.type for value in raw.inputs if value.name in both and value.type is not None}
        final = {local[name]: array for name, array in initializers.items()}
        self._standard.declare(values, final)
        nodes = self._nodes(raw.nodes, scope, path)
        outputs = tuple(Value(self._resolve(value.name, scope, "an output"), value.type) for value in raw.outputs)
        if any(not value.name for value in outputs):
            raise self._bad(f"{where} gives an input of the function around it that the call leaves out")
        return Graph(
            raw.name,
            tuple(nodes),
            values,
            outputs,
            final,
            frozenset(both) if self._overrides else frozenset(),
            types,
        )

    def _definitions(
        self,
        where: str,
        inputs: Sequence[str],
        initializers: Iterable[str],
        both: set[str],
        nodes: Sequence[RawNode],
    ) -> dict[str, None]:
        """All names that a graph defines, in order. Raises InvalidModel where one is defined twice."""
        defined: dict[str, None] = {}
        for name in inputs:
            if not name or name in defined:
                raise self._bad(f"{where} has two inputs named {name!r}" if name else f"{where} has an input without a name")
            defined[name] = None
        for name in initializers:
            if name in defined and name not in both:
                raise self._bad(f"{where} defines {name!r} twice")
            defined[name] = None
        for node in nodes:
            for name in node.outputs:
                if not name:
                    continue
                if name in defined:
                    raise self._bad(
                        f"{where} defines {name!r} twice; the second time as an output of {node.op_type} {node.name!r}. "
                        "The file is damaged or was put together wrongly."
                    )
                defined[name] = None
        return defined

    def _fresh(self, name: str) -> str:
        """A name nobody has: `name`, or `name` with a number."""
        candidate, number = name, 1
        while candidate in self._taken:
            number += 1
            candidate = f"{name}_{number}"
        self._taken.add(candidate)
        return candidate

    def _resolve(self, name: str, scope: _Scope, what: str) -> str:
        final = scope.find(name) if name else None
        if final is None:
            raise self._bad(
                f"{what} of {scope.where} refers to {name!r}, which nothing defines. "
                "The file is damaged, or was cut out of a larger model without this value."
            )
        return final

    # -- order ------------------------------------------------------------------------------------------------

    def _references(self, node: RawNode) -> set[str]:
        found = {name for name in node.inputs if name}
        for graph in node.subgraphs():
            found |= self._outer_names(graph)
        return found

    def _outer_names(self, raw: RawGraph) -> frozenset[str]:
        cached = self._outer.get(id(raw))
        if cached is None:
            inside = {value.name for value in raw.inputs} | set(raw.initializers)
            used = {value.name for value in raw.outputs}
            for node in raw.nodes:
                inside.update(node.outputs)
                used |= self._references(node)
            cached = self._outer[id(raw)] = (raw, frozenset(used - inside))
        return cached[1]

    def _sorted(self, nodes: Sequence[RawNode], where: str) -> Sequence[RawNode]:
        """The nodes so that each comes after what it needs; the order of the file where that is possible."""
        producer = {name: index for index, node in enumerate(nodes) for name in node.outputs if name}
        needs = [{producer[name] for name in self._references(node) if name in producer} for node in nodes]
        if all(max(need, default=-1) < index for index, need in enumerate(needs)):
            return nodes
        waiting = [len(need) for need in needs]
        users: list[list[int]] = [[] for _ in nodes]
        for index, need in enumerate(needs):
            for other in need:
                users[other].append(index)
        ready = [index for index, count in enumerate(waiting) if count == 0]
        order: list[int] = []
        while ready:
            index = heapq.heappop(ready)
            order.append(index)
            for user in users[index]:
                waiting[user] -= 1
                if waiting[user] == 0:
                    heapq.heappush(ready, user)
        if len(order) < len(nodes):
            stuck = [nodes[index] for index, count in enumerate(waiting) if count]
            names = ", ".join(f"{node.op_type} {node.name or (node.outputs or ('',))[0]!r}" for node in stuck[:5])
            raise self._bad(f"{where} has a cycle: each of these nodes waits for another one: {names}")
        return [nodes[index] for index in order]

    # -- nodes ------------------------------------------------------------------------------------------------

    def _nodes(self, raws: Sequence[RawNode], scope: _Scope, path: tuple[int, ...]) -> list[Node]:
        out: list[Node] = []
        for raw in self._sorted(raws, scope.where):
            self._node(raw, scope, self._next(path), out)
        return out

    def _next(self, path: tuple[int, ...]) -> tuple[int, ...]:
        """The path of the next node below `path`."""
        index = self._numbers.get(path, 0)
        self._numbers[path] = index + 1
        return (*path, index)

    def _spend(self) -> None:
        self._count += 1
        if self._count > self._budget.nodes:
            raise self._bad(
                f"there are more than {self._budget.nodes} nodes, the budget, once its functions are expanded"
            )

    def _node(self, raw: RawNode, scope: _Scope, path: tuple[int, ...], out: list[Node]) -> None:
        label = raw.name or next((name for name in raw.outputs if name), "") or f"{raw.op_type}_{path[-1]}"
        if scope.prefix is not None:
            label = f"{scope.prefix}/{label}"
        what = f"{raw.op_type} node {label!r}"
        inputs = tuple(self._resolve(name, scope, what) if name else "" for name in raw.inputs)
        outputs = tuple(scope.names[name] if name else "" for name in raw.outputs)
        attributes: dict[str, object] = {}
        graphs: dict[str, RawGraph] = {}
        for name, value in raw.attributes.items():
            if isinstance(value, Reference):
                if scope.bindings is None:
                    raise self._bad(f"{what} takes attribute {name!r} from a function around it, but it is in none")
                if value.name in scope.bindings:
                    attributes[name] = scope.bindings[value.name]
                continue
            if isinstance(value, RawGraph):
                graphs[name] = value
            attributes[name] = self._attribute(value, scope, path)
        key = (raw.domain, raw.op_type, raw.overload)
        own = self._functions.get(key)
        if own is not None:
            if key in self._stack:
                names = " -> ".join(item[1] for item in self._stack)
                raise self._bad(f"function {raw.op_type!r} of domain {raw.domain!r} calls itself: {names} -> {raw.op_type}")
            self._stack.append(key)
            call = Node(raw.op_type, raw.domain, inputs, outputs, attributes, label, path, 0)
            self._call(own(), f"function {raw.op_type!r}", call, None, scope.depth + 1, out)
            self._stack.pop()
            return
        opset = scope.imports.get(raw.domain, self._opsets.get(raw.domain))
        if opset is None:
            raise self._bad(
                f"{what} uses domain {raw.domain or 'ai.onnx'!r}, of which the model imports no version. "
                "Add an opset_import for it, or export the model again."
            )
        node = Node(raw.op_type, raw.domain, inputs, outputs, attributes, label, path, opset)
        if not self._known(raw.domain, raw.op_type, opset) and self._expand(raw, node, graphs, scope, out):
            return
        self._spend()
        self._standard.infer(node)
        out.append(node)

    def _attribute(self, value: object, scope: _Scope, path: tuple[int, ...]) -> object:
        if isinstance(value, RawGraph):
            return self._graph(value, scope, path, scope.depth + 1, scope.imports, scope.bindings)
        if isinstance(value, tuple):
            return tuple(self._attribute(item, scope, path) for item in value)
        return value

    def _expand(
        self, raw: RawNode, node: Node, graphs: Mapping[str, RawGraph], scope: _Scope, out: list[Node]
    ) -> bool:
        """Expands an operator by its body in the standard; False where it has none that fits."""
        key = (raw.domain, raw.op_type, f"onnx {node.opset}")
        if key in self._stack:
            return False
        whole = {name for name, value in node.attributes.items() if _has_graph(value)}
        if whole and (whole != set(graphs) or scope.bindings is not None):
            return False  # the body would be a graph whose names belong to another function
        body = self._standard.body(node, graphs)
        if body is None:
            return False
        captured: frozenset[str] = frozenset().union(*(self._outer_names(graph) for graph in graphs.values()))
        inside = {name for item in body.nodes for name in item.outputs} | set(body.inputs)
        if captured & inside:
            return False  # a name of the body would hide one that the subgraph takes from around
        self._stack.append(key)
        self._call(body, f"operator {node.operator}", node, scope if graphs else None, scope.depth + 1, out)
        self._stack.pop()
        return True

    def _call(
        self, body: RawFunction, what: str, call: Node, parent: _Scope | None, depth: int, out: list[Node]
    ) -> None:
        """Puts the nodes of a function body where its call was. An attribute that the call does not give and that has
        no default is left out of the nodes that refer to it.
        """
        self._spend()
        if depth > self._budget.nesting:
            raise self._bad(f"functions are nested more than {self._budget.nesting} deep")
        if len(call.inputs) > len(body.inputs) or len(call.outputs) > len(body.outputs):
            raise self._bad(
                f"{call.name!r} calls {what} with {len(call.inputs)} inputs and {len(call.outputs)} outputs; "
                f"it has {len(body.inputs)} and {len(body.outputs)}"
            )
        self._definitions(what, body.inputs, (), set(), body.nodes)
        absent = ("",) * (len(body.inputs) - len(call.inputs))
        names = dict(zip(body.inputs, call.inputs + absent, strict=True))
        produced = {name for node in body.nodes for name in node.outputs if name}
        copies: list[tuple[str, str]] = []
        for name, actual in zip(body.outputs, call.outputs, strict=False):
            if not actual:
                continue
            if name in produced and name not in names:
                names[name] = actual
            else:  # an input handed through, or one value under two names
                copies.append((name, actual))
        for name in (name for node in body.nodes for name in node.outputs):  # in order: names must not vary by hash seed
            if name and name not in names:
                names[name] = self._fresh(f"{call.name}/{name}")
        imports = {**self._opsets, **body.opsets}
        scope = _Scope(names, parent, imports, {**body.defaults, **call.attributes}, depth, call.name, what)
        self.expanded += 1
        out.extend(self._nodes(body.nodes, scope, call.path))
        for name, actual in copies:
            self._spend()
            taken = self._resolve(name, scope, "an output")
            if not taken:
                raise self._bad(f"{call.name!r} calls {what} without its input {name!r}, which is also its output")
            path = self._next(call.path)
            copy = Node("Identity", "", (taken,), (actual,), {}, f"{call.name}/{name}", path, imports.get("", 1))
            self._standard.infer(copy)
            out.append(copy)


def _has_graph(value: object) -> bool:
    return isinstance(value, Graph) or (isinstance(value, tuple) and any(isinstance(item, Graph) for item in value))


def _collect_names(raw: RawGraph, found: set[str]) -> None:
    """Every name of a value in the graph and its subgraphs."""
    found.update(value.name for value in raw.inputs)
    found.update(raw.initializers)
    for node in raw.nodes:
        found.update(node.outputs)
        for graph in node.subgraphs():
            _collect_names(graph, found)
