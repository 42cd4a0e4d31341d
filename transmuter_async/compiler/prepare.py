"""A model made ready for compiling: passes applied, constants folded, weights on the device once.

A `PreparedGraph` is shared by everything that compiles or runs one model with one set of options. Once made, only its
table of device weights changes: entries are added by compile threads, under a lock, and dropped by `release`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from transmuter_async.compiler.batching import Plan, plan_batching
from transmuter_async.compiler.common import device_copy, one_of_equal
from transmuter_async.compiler.dense import densify
from transmuter_async.compiler.disk import DiskCache, device_facts, graph_digest
from transmuter_async.compiler.flow import nodes_between
from transmuter_async.compiler.fold import fold_constants
from transmuter_async.compiler.options import Options
from transmuter_async.compiler.placement import Placement, batch_axes, spread_rows
from transmuter_async.compiler.scales import merge_scales
from transmuter_async.errors import InputError
from transmuter_async.graph import (
    Graph,
    Model,
    Node,
    TensorType,
    Value,
    deduplicate,
    freeze,
    lasting_empty,
    prune,
    remove_identity,
)
from transmuter_async.operators import GROWING, RECIPES, lowerings_for, resolve, uses_half
from transmuter_async.version import __version__

__all__ = ["PreparedGraph", "is_host_only", "prepare_graph"]

DIM_LIKE_ELEMENTS = 64
"""An integer input of at most rank 1 and this many elements, by the graph's types, may become a static value."""


Origin = tuple[tuple[int | None, ...], str, tuple[float, ...]]
"""Numbers of weights, the recipe that something was made of them by, and what else it takes."""


@dataclass(frozen=True, slots=True)
class Declared:
    """What a model says that its graph no longer does once it is ready to be compiled.

    Attributes:
        nodes: Name and operator of each node.
        replaceable: Names of the initializers that a call could replace.
    """

    nodes: frozenset[tuple[str, str]]
    replaceable: frozenset[str]

    @classmethod
    def by(cls, graph: Graph) -> Declared:
        """Of a graph as loaded."""
        return cls(frozenset((node.name, node.op_type) for node in graph.nodes), graph.overridable)


class PreparedGraph:
    """A graph ready to be compiled in segments.

    Attributes:
        model: The model that was loaded, with the graph that was made of its own, so that weights which are not needed any more
            are not kept. Buckets do not pad it.
        declared: What that other graph said.
        options: What was asked for.
        graph: After passes and folding.
        nodes: Its nodes; a segment is a run of these, named by the index of its first.
        host_only: Indices of the nodes that can never be part of a program unless all of their inputs are known.
        output_names: The names of the outputs, for look-ups.
        last_use: For each name, the index of the last node that reads it; `len(nodes)` for an output.
        path: Empty for the graph itself; for a body that runs on the host, the way to it.
        root: The graph itself; it holds the weights of all of its bodies.
        dim_like: Names of values that may become static, by the graph's declared types.
        producers: Node by name of its output, subgraphs included.
        padding: How calls are padded and cut, None where they are not.
        lowerings: Names of the forms that operators take in programs.
        wide: Whether programs compute float16 as float32.
        placement: The devices that its programs run on; `device` is the first of them.
        batch_axes: The axis of each input along which a mesh splits it.
        first: The one of the same graph that was prepared first; replicas on other devices share what it knows of the graph.
        graph_break: Whether the graph breaks: True, False, or None while nothing was compiled that tells.
    """

    graph_break: bool | None
    batch_axes: dict[str, int]

    def __init__(
        self,
        model: Model,
        options: Options,
        graph: Graph,
        place: Placement | jax.Device,
        first: PreparedGraph | None = None,
    ) -> None:
        placement = place if isinstance(place, Placement) else Placement((place,))
        self.declared: Declared = Declared.by(model.graph) if first is None else first.declared
        model = replace(model, graph=replace(graph, initializers=dict(graph.initializers)))
        self.padding: Plan | None = None
        if first is not None:
            self.padding = first.padding
        elif options.batching is not None:
            self.padding = plan_batching(graph, options.batching, watched=options.nonfinite != "ignore")
            if placement.mesh is not None:
                self.padding = spread_rows(self.padding, len(placement.devices))
            graph = self.padding.padded_graph or graph
        self._setup(model, options, graph, placement)
        if self.padding is not None:
            self.last_use.update(dict.fromkeys(self.padding.kept, len(self.nodes)))
        self.path: tuple[Any, ...] = ()
        self.producers: dict[str, Node] = {name: node for node in graph.walk() for name in node.outputs if name}
        self.dim_like: frozenset[str] = _dim_like(graph)
        self._weights: dict[int, tuple[np.ndarray, jax.Array]] = {}
        self._rearranged: dict[Origin, np.ndarray | None] = {}
        self._origins: dict[int, Origin] = {}
        self._grown = 0
        self._lock = threading.Lock()
        self.root: PreparedGraph = self
        if placement.mesh is not None:
            self.batch_axes = batch_axes(self.padding)
        self.disk: DiskCache | None = (
            None if options.cache_dir is None else DiskCache(options.cache_dir, limit=options.cache_dir_bytes)
        )
        self._all_weights = tuple(_all_initializers(graph))
        self._weight_numbers = {id(array): number for number, array in enumerate(self._all_weights)}
        self._digest: str | None = None
        self._contents: str | None = None
        self._contents_lock = threading.Lock()
        self.first: PreparedGraph = self if first is None else first
        self.graph_break = self.first.graph_break

    def _setup(self, model: Model, options: Options, graph: Graph, placement: Placement) -> None:
        self.model = model
        self.options = options
        self.graph = graph
        self.placement = placement
        self.batch_axes = {}
        self.device: jax.Device = placement.device
        self.platform: str = self.device.platform
        self.lowerings = lowerings_for(self.platform, optimize=options.optimize, forced=options.lowerings)
        policy = options.float16 or ("float32" if self.platform == "cpu" and options.optimize else "float16")
        self.wide = policy == "float32" and uses_half(graph)
        self.nodes: tuple[Node, ...] = graph.nodes
        self.outputs: tuple[str, ...] = tuple(value.name for value in graph.outputs)
        self.output_names = frozenset(self.outputs)
        producers = {name: node for node in graph.nodes for name in node.outputs if name}
        self.reads: tuple[frozenset[str], ...] = tuple(_reads(node, producers) for node in graph.nodes)
        self.last_use: dict[str, int] = {}
        for index, names in enumerate(self.reads):
            for name in names:
                self.last_use[name] = index
        for name in self.outputs:
            self.last_use[name] = len(self.nodes)
        self.host_only: frozenset[int] = frozenset(i for i, node in enumerate(graph.nodes) if is_host_only(node))
        self.graph_break = None
        self._subgraphs: dict[tuple[int, str], PreparedGraph] = {}

    def subgraph(self, index: int, attribute: str) -> PreparedGraph:
        """The body of a control-flow node that runs on the host, ready to be compiled in segments of its own.

        Its small integers never become static: a loop counter would compile a program for each iteration.
        """
        with self.root._lock:
            found = self._subgraphs.get((index, attribute))
            if found is None:
                graph = self.nodes[index].attributes[attribute]
                assert isinstance(graph, Graph)
                found = PreparedGraph.__new__(PreparedGraph)
                merged = replace(graph, initializers={**self.graph.initializers, **graph.initializers})
                found._setup(self.model, self.options, merged, self.placement)
                found.path = (*self.path, index, attribute)
                found.wide = self.root.wide
                found.producers = self.root.producers
                found.dim_like = self.dim_like & graph.outer_names()
                found.root = self.root
                self._subgraphs[index, attribute] = found
        return found

    def position(self, index: int) -> int:
        """The position, in the file, of the node at `index`; of the first one it is always 0."""
        return 0 if index == 0 and not self.path else self.nodes[index].position

    def on_device(self, arrays: Iterable[np.ndarray]) -> tuple[jax.Array, ...]:
        """Arrays as arguments of a program. Weights are put on the device once and shared by all programs."""
        root = self.root
        found = []
        for array in arrays:
            if id(array) not in root._weight_numbers and id(array) not in root._origins:
                found.append(jax.device_put(array, self.placement.home))
                continue
            with root._lock:
                entry = root._weights.get(id(array))
                if entry is None:
                    entry = (array, device_copy(array, self.placement.home))
                    root._weights[id(array)] = entry
            found.append(entry[1])
        return tuple(found)

    def rearranged(
        self, arrays: tuple[np.ndarray | None, ...], recipe: str, arguments: tuple[float, ...] = ()
    ) -> np.ndarray | None:
        """What a recipe of `operators.RECIPES` makes of weights: once, in aligned memory, for all programs.

        Returns:
            None where it is larger than they are, and all that was made so far is above the budget of constant folding.
        """
        if recipe == "same":
            return arrays[0]
        if len(arrays) == 1 and f"wide {recipe}" in RECIPES:
            made_of = self._origins.get(id(arrays[0]))
            if made_of is not None and made_of[1] == "wide same":  # of the weight, so that it can be named
                arrays, recipe = (self._all_weights[made_of[0][0] or 0],), f"wide {recipe}"
        numbers = tuple(None if array is None else self._weight_numbers.get(id(array), -1) for array in arrays)
        if -1 in numbers:
            return np.ascontiguousarray(RECIPES[recipe](*arrays, *arguments))
        key = (numbers, recipe, arguments)
        with self._lock:
            if key not in self._rearranged:
                self._rearranged[key] = self._make(key, arrays)
            return self._rearranged[key]

    def _make(self, key: Origin, arrays: tuple[np.ndarray | None, ...]) -> np.ndarray | None:
        _, recipe, arguments = key
        size = sum(array.nbytes for array in arrays if array is not None)
        grows = recipe in GROWING
        if grows and not self.options.fold_bytes:
            return None
        made = RECIPES[recipe](*arrays, *arguments)
        if _is_ready(made, arrays):
            self._origins[id(made)] = key
            return made  # type: ignore[no-any-return]
        if grows:
            budget = self.options.fold_bytes + 2 * sum(array.nbytes for array in self._all_weights)
            if self._grown + made.nbytes - size > budget:
                return None
            self._grown += made.nbytes - size
        found = lasting_empty(made.size, made.dtype).reshape(made.shape)
        found[...] = made
        found = one_of_equal(freeze(found))
        self._origins[id(found)] = key
        return found

    def origin(self, array: np.ndarray) -> Origin | None:
        """The weights and the recipe that an array was made of; None for any other array."""
        return self._origins.get(id(array))

    def weight_number(self, array: np.ndarray) -> int | None:
        """The number of a weight among all of the graph's, bodies included; None for an array that is none."""
        return self._weight_numbers.get(id(array))

    def weight(self, number: int) -> np.ndarray:
        """The weight with a number; IndexError where there is none."""
        return self._all_weights[number]

    def digest(self) -> str:
        """Digest of everything but place and values that decides this graph's programs. Reads all weights once."""
        with self._lock:
            if self._digest is None:
                options = replace(
                    self.options, cache_dir=None, cache_dir_bytes=0, cache_size=1, batching=None, cold="compile"
                )
                facts: tuple[object, ...] = (__version__, options, sorted(self.dim_like), device_facts(self.device))
                if options.autotune:
                    facts += ("autotune",)
                text = repr(facts) + self.first.contents()
                self._digest = hashlib.sha256(text.encode()).hexdigest()
            return self._digest

    def contents(self) -> str:
        """Digest of the graph and its weights, wherever it runs."""
        with self._contents_lock:
            if self._contents is None:
                self._contents = graph_digest(self.graph)
            return self._contents

    def noted_weights(self) -> tuple[frozenset[int], frozenset[Origin]]:
        """What `forget_weights` is to leave: which weights are on the device, and what was made of some."""
        with self._lock:
            return frozenset(self._weights), frozenset(self._rearranged)

    def forget_weights(self, noted: tuple[frozenset[int], frozenset[Origin]], used: frozenset[int]) -> None:
        """Let go of weights that were made and put on the device for programs that were only tried.

        Another thread's program may have come to use some meanwhile: it holds them itself, and the next one makes its own.

        Args:
            noted: Before they were tried.
            used: By `id`, arrays that the program reads which was chosen.
        """
        before, made_before = noted
        with self._lock:
            for key, made in list(self._rearranged.items()):
                if key in made_before or (made is not None and id(made) in used):
                    continue
                del self._rearranged[key]
                if made is not None:
                    self._origins.pop(id(made), None)
                    numbers, recipe, _ = key
                    if recipe in GROWING:
                        self._grown -= made.nbytes - sum(
                            self._all_weights[number].nbytes for number in numbers if number is not None
                        )
            # Equal arrays are one: what another recipe made may be the same.
            left = {id(made): key for key, made in self._rearranged.items() if made is not None}
            self._origins.update((number, key) for number, key in left.items() if number not in self._origins)
            for number in self._weights.keys() - before - used - left.keys():
                del self._weights[number]

    def weight_bytes(self) -> int:
        """Bytes of the weights that are on each device now."""
        with self._lock:
            return sum(device.nbytes for _, device in self._weights.values())

    def release(self) -> None:
        """Forget the device's copies of the weights. Programs that hold them keep them alive until dropped."""
        with self._lock:
            self._weights.clear()
            self._rearranged.clear()
            self._origins.clear()
            self._grown = 0


def prepare_graph(model: Model, options: Options, held: Sequence[Mapping[str, np.ndarray]] = ()) -> Graph:
    """Apply passes and folding to a model's graph.

    Args:
        model: As loaded.
        options: Decide which outputs remain, what is optimized, and the budget of folding.
        held: What holds the model's weights and nobody needs; see `merge_scales`.

    Returns:
        A graph of the same outputs whose replaceable initializers are settled.

    Raises:
        UnsupportedModel: It needs operators without a definition; all are listed.
        InputError: `options` names an output or a static input that the graph does not have.
    """
    model.check().raise_for_missing()
    graph = model.graph
    names = [value.name for value in graph.outputs]
    if options.outputs is not None:
        unknown = [name for name in options.outputs if name not in names]
        if unknown:
            raise InputError(f"outputs={unknown} are no outputs of the model; it has {names}")
        graph = prune(graph, options.outputs)
    strangers = [name for name in options.static_inputs if name not in {v.name for v in graph.inputs}]
    if strangers:
        raise InputError(
            f"static_inputs={strangers} are no inputs of the model; it has {[v.name for v in graph.inputs]}"
        )
    graph = _settle_overrides(graph, options.overrides)
    strangers = [name for name in options.donate if name not in {v.name for v in graph.inputs}]
    if strangers:
        raise InputError(f"donate={strangers} are no inputs of the model; it has {[v.name for v in graph.inputs]}")
    keep = frozenset(value.name for value in graph.outputs)
    # Gradient names tensors in its attributes, which passes over inputs and outputs would not see.
    if options.optimize and not any(node.op_type == "Gradient" for node in graph.walk()):
        graph = remove_identity(graph)
        weight_bytes = sum(array.nbytes for array in graph.initializers.values())
        budget = 2 * weight_bytes + options.fold_bytes if options.fold_bytes else 0
        graph = fold_constants(graph, budget=budget, keep=keep)
        graph = deduplicate(graph)
        # An alarm names the node whose result it is; and the model holds the weights as loaded.
        if options.scales and options.fold_bytes and options.nonfinite == "ignore":
            graph = merge_scales(graph, held)
        if options.dense and options.nonfinite == "ignore":  # spare rows may be NaN where a mask selects nothing
            graph = densify(graph)
        graph = prune(graph)  # an input that nothing reads stays an input: callers give it
    return graph


def _settle_overrides(graph: Graph, overrides: tuple[str, ...]) -> Graph:
    """Make the named initializers inputs, and the other overridable ones plain."""
    strangers = [name for name in overrides if name not in graph.overridable]
    if strangers:
        raise InputError(f"{strangers} are neither inputs nor replaceable initializers of the model")
    given = tuple(Value(name, TensorType(array.dtype, array.shape)) for name, array in _items(graph, overrides))
    initializers = {name: array for name, array in graph.initializers.items() if name not in overrides}
    return replace(graph, inputs=graph.inputs + given, initializers=initializers, overridable=frozenset())


def _items(graph: Graph, names: tuple[str, ...]) -> Iterable[tuple[str, np.ndarray]]:
    return ((name, graph.initializers[name]) for name in names)


def _is_ready(made: np.ndarray, weights: Iterable[np.ndarray | None]) -> bool:
    """Whether what a recipe made is another view of a weight's memory, and may be an argument as it is."""
    mine = made.flags.c_contiguous and not made.flags.writeable and made.ctypes.data % 64 == 0
    return mine and any(each is not made and each is not None and np.may_share_memory(made, each) for each in weights)


def is_host_only(node: Node) -> bool:
    """Whether the node can never be part of a program unless all of its inputs are known."""
    definition = resolve(node.domain, node.op_type, node.opset)
    return definition is not None and definition.host


def _reads(node: Node, producers: Mapping[str, Node]) -> frozenset[str]:
    names = {name for name in node.inputs if name}
    if node.op_type == "Gradient" and node.domain == "ai.onnx.preview.training":
        arguments = (*node.attributes["xs"], *node.attributes.get("zs", ()))  # type: ignore[misc]
        between = nodes_between(producers, arguments, str(node.attributes["y"]))
        names.update(name for each in between for name in _reads(each, producers))
    for graph in node.subgraphs():
        names |= graph.outer_names()
    return frozenset(names)


def _dim_like(graph: Graph) -> frozenset[str]:
    declared = dict(graph.types) | {value.name: value.type for value in graph.inputs}
    return frozenset(name for name, type in declared.items() if _is_dim_like(type))


def _is_dim_like(type: Any) -> bool:
    if not isinstance(type, TensorType) or type.dtype is None or type.shape is None:
        return False
    if type.dtype.kind not in "iub" or len(type.shape) > 1:
        return False
    return all(isinstance(dim, int) and dim <= DIM_LIKE_ELEMENTS for dim in type.shape)


def _all_initializers(graph: Graph) -> Iterable[np.ndarray]:
    yield from graph.initializers.values()
    for node in graph.nodes:
        for subgraph in node.subgraphs():
            yield from _all_initializers(subgraph)
