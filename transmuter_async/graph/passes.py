"""Passes over a graph before it is traced: each a pure function Graph -> Graph, each can be left out.

What every pass keeps: names and order of the outputs, what subgraphs take from around them, `overridable` initializers,
and `Node.path`. Constant folding needs operators and lives in the compiler.

They rely on the reader's invariant that no name of a subgraph hides one from around it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from ..errors import InputError
from .dtypes import STRING
from .model import Graph, Node, SparseTensor, Value
from .storage import aligned_empty, freeze

__all__ = ["PASSES", "constants_to_initializers", "deduplicate", "is_random", "prune", "remove_identity", "simplify"]

_RANDOM = frozenset(
    {"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
# Operators of other domains may do anything; these two are known not to hide a random one
_PURE_DOMAINS = frozenset({"", "ai.onnx.ml"})
_COMPARED = 1 << 16  # bytes of an attribute up to which two nodes with equal values count as equal
_STEP = 1 << 24


def is_random(node: Node) -> bool:
    """Whether two runs of the node may differ: such nodes are never merged. Dropout counts, also where it is one that
    only passes its input on.
    """
    return node.op_type in _RANDOM or node.domain not in _PURE_DOMAINS or "seed" in node.attributes


def prune(graph: Graph, outputs: Sequence[str] | None = None) -> Graph:
    """The graph without nodes and initializers that no output needs.

    Args:
        graph: The top-level graph.
        outputs: Names of the outputs to keep, in this order; inner values of the graph may become outputs. Inputs that
            none of them needs are dropped. All outputs, and all inputs, where None.

    Raises:
        InputError: The graph has no value of such a name.
    """
    kept = graph.outputs if outputs is None else _chosen(graph, outputs)
    return _pruned(graph, kept, keep_inputs=outputs is None)


def _chosen(graph: Graph, names: Sequence[str]) -> tuple[Value, ...]:
    declared = {value.name: value for value in (*graph.inputs, *graph.outputs)}
    inner = {name for node in graph.nodes for name in node.outputs if name} | set(graph.initializers)
    unknown = [name for name in names if name not in declared and name not in inner]
    if unknown or not names:
        have = ", ".join(value.name for value in graph.outputs)
        raise InputError(f"the graph has no values named {unknown}; its outputs are {have}" if unknown else "no outputs given")
    if len(set(names)) < len(names):
        raise InputError(f"outputs are named twice: {list(names)}")
    return tuple(declared.get(name) or Value(name, graph.types.get(name)) for name in names)


def _pruned(graph: Graph, outputs: tuple[Value, ...], *, keep_inputs: bool) -> Graph:
    needed = {value.name for value in outputs}
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if not any(name in needed for name in node.outputs if name):
            continue
        node = _over_subgraphs(node, lambda inner: _pruned(inner, inner.outputs, keep_inputs=True))
        needed.update(name for name in node.inputs if name)
        for inner in node.subgraphs():
            needed |= inner.outer_names()
        nodes.append(node)
    nodes.reverse()
    initializers = {name: array for name, array in graph.initializers.items() if name in needed}
    inputs = graph.inputs if keep_inputs else tuple(value for value in graph.inputs if value.name in needed)
    alive = needed | {name for node in nodes for name in node.outputs}
    return replace(
        graph,
        nodes=tuple(nodes),
        inputs=inputs,
        outputs=outputs,
        initializers=initializers,
        overridable=graph.overridable.intersection(initializers),
        types={name: declared for name, declared in graph.types.items() if name in alive},
    )


def remove_identity(graph: Graph) -> Graph:
    """The graph without Identity nodes, but for those that give an output its name."""
    return _without_identity(graph, {})


def _without_identity(graph: Graph, outer: Mapping[str, str]) -> Graph:
    names = dict(outer)
    given = {value.name for value in graph.outputs}
    nodes: list[Node] = []
    for node in graph.nodes:
        node = _over_subgraphs(_renamed(node, names), lambda inner: _without_identity(inner, names))
        plain = node.op_type == "Identity" and node.domain == "" and len(node.inputs) == len(node.outputs) == 1
        if plain and node.inputs[0] and node.outputs[0] not in given:
            names[node.outputs[0]] = node.inputs[0]
            continue
        nodes.append(node)
    return _with_outputs(replace(graph, nodes=tuple(nodes)), outer)


def deduplicate(graph: Graph) -> Graph:
    """The graph with equal initializers, and nodes that compute the same, merged into the first of them.

    Random operators, operators with subgraphs and operators of other domains stay. Equal means equal bytes: 0.0 and -0.0
    differ, a NaN equals itself.
    """
    return _deduplicated(graph, {}, {})


def _deduplicated(graph: Graph, outer: Mapping[str, str], around: Mapping[object, Sequence[tuple[str, np.ndarray]]]) -> Graph:
    names = dict(outer)
    given = {value.name for value in graph.outputs}
    groups = {key: list(found) for key, found in around.items()}
    initializers: dict[str, np.ndarray] = {}
    for name, array in graph.initializers.items():
        if name not in graph.overridable:
            group = groups.setdefault(_sketch(array), [])
            twin = next((other for other, seen in group if same_array(array, seen)), None)
            if twin is not None and name not in given:
                names[name] = twin
                continue
            group.append((name, array))
        initializers[name] = array
    seen_nodes: dict[object, Node] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        node = _over_subgraphs(_renamed(node, names), lambda inner: _deduplicated(inner, names, groups))
        key = None if is_random(node) else _node_key(node)
        if key is not None:
            twin_node = seen_nodes.setdefault(key, node)
            if twin_node is not node and not given.intersection(node.outputs):
                names.update(zip(node.outputs, twin_node.outputs, strict=True))
                names.pop("", None)
                continue
        nodes.append(node)
    return _with_outputs(replace(graph, nodes=tuple(nodes), initializers=initializers), outer)


def _node_key(node: Node) -> object:
    """What two nodes that compute the same share, None for a node that is never merged."""
    attributes = []
    for name in sorted(node.attributes):
        key = _attribute_key(node.attributes[name])
        if key is None:
            return None
        attributes.append((name, key))
    wanted = tuple(bool(name) for name in node.outputs)
    return node.op_type, node.domain, node.opset, node.inputs, wanted, tuple(attributes)


def _attribute_key(value: object) -> object:
    if isinstance(value, (bool, int, str, bytes)):
        return type(value).__name__, value
    if isinstance(value, float):
        return "float", np.float64(value).tobytes()
    if isinstance(value, tuple):
        keys = tuple(_attribute_key(item) for item in value)
        return None if any(key is None for key in keys) else ("tuple", keys)
    if isinstance(value, np.ndarray) and value.dtype != STRING and value.nbytes <= _COMPARED:
        return "array", value.dtype.name, value.shape, value.tobytes()
    if isinstance(value, np.ndarray) and value.dtype == STRING and value.size <= _COMPARED >> 4:
        return "strings", value.shape, tuple(value.reshape(-1))
    return None


def _sketch(array: np.ndarray) -> object:
    """A cheap key that equal arrays share."""
    if array.dtype == STRING:
        return "strings", array.shape
    flat = array.reshape(-1).view(np.uint8)
    return array.dtype.name, array.shape, flat[:64].tobytes(), flat[-64:].tobytes()


def same_array(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether dtype, shape and bytes are equal."""
    if one is other:
        return True
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype == STRING:
        return bool((one == other).all())
    left, right = one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8)
    return all(
        np.array_equal(left[start : start + _STEP], right[start : start + _STEP]) for start in range(0, len(left), _STEP)
    )


def constants_to_initializers(graph: Graph) -> Graph:
    """The graph with its Constant nodes turned into initializers."""
    initializers = dict(graph.initializers)
    nodes: list[Node] = []
    for node in graph.nodes:
        node = _over_subgraphs(node, constants_to_initializers)
        array = constant_of(node)
        if array is None or not node.outputs or not node.outputs[0]:
            nodes.append(node)
        else:
            initializers[node.outputs[0]] = array
    return replace(graph, nodes=tuple(nodes), initializers=initializers)


def constant_of(node: Node) -> np.ndarray | None:
    """The value of a Constant node as a read-only array, None for any other node.

    Source: ai.onnx Constant 1, 9, 11, 12, 13 and above.
    """
    if node.op_type != "Constant" or node.domain or len(node.attributes) != 1:
        return None
    ((name, value),) = node.attributes.items()
    if name == "value" and isinstance(value, np.ndarray):
        return value
    if name == "sparse_value" and isinstance(value, SparseTensor):
        return _frozen(value.dense())
    if name in ("value_float", "value_floats"):
        return _frozen(np.array(value, np.float32))
    if name in ("value_int", "value_ints"):
        return _frozen(np.array(value, np.int64))
    texts = value if isinstance(value, tuple) else (value,)
    if name in ("value_string", "value_strings") and all(isinstance(text, str) for text in texts):
        return _frozen(np.array(value, STRING))
    return None


def _frozen(array: np.ndarray) -> np.ndarray:
    """A read-only array, in aligned memory unless it holds strings."""
    if array.dtype == STRING:
        return freeze(array)
    out = aligned_empty(array.size, array.dtype).reshape(array.shape)
    out[...] = array
    return freeze(out)


# -- all of them ---------------------------------------------------------------------------------------------------

PASSES: Mapping[str, Callable[[Graph], Graph]] = MappingProxyType(
    {
        "constants": constants_to_initializers,
        "identity": remove_identity,
        "duplicates": deduplicate,
        "dead code": prune,
    }
)
"""The passes by name, in the order in which they help each other."""


def simplify(graph: Graph, *, skip: Collection[str] = ()) -> Graph:
    """The graph after all passes but those named in `skip`. Raises KeyError for a name that no pass has."""
    for name in skip:
        PASSES[name]
    for name, apply in PASSES.items():
        if name not in skip:
            graph = apply(graph)
    return graph


# -- helpers -------------------------------------------------------------------------------------------------------


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    if not any(name in names for name in node.inputs):
        return node
    return replace(node, inputs=tuple(names.get(name, name) for name in node.inputs))


def _with_outputs(graph: Graph, names: Mapping[str, str]) -> Graph:
    """A subgraph may give a value from around it as its output; that one may have another name now."""
    if not any(value.name in names for value in graph.outputs):
        return graph
    return replace(graph, outputs=tuple(replace(value, name=names.get(value.name, value.name)) for value in graph.outputs))


def _over_subgraphs(node: Node, change: Callable[[Graph], Graph]) -> Node:
    """The node with each of its subgraphs changed."""
    if not any(True for _ in node.subgraphs()):
        return node
    return replace(node, attributes={name: _over(value, change) for name, value in node.attributes.items()})


def _over(value: object, change: Callable[[Graph], Graph]) -> object:
    if isinstance(value, Graph):
        return change(value)
    if isinstance(value, tuple):
        items: Iterable[object] = value
        return tuple(_over(item, change) for item in items)
    return value
