"""The frozen values that a read ONNX model consists of. No protobuf, no JAX, no files here.

Invariants that the reader establishes and everything after it may rely on:

- Nodes of a graph are topologically sorted; every name has one definition; names of a subgraph may refer to values of
  the graphs around it.
- Model-local functions, and the ONNX function bodies of operators without a definition of their own, are expanded.
- `Node.path` is stable: it does not change with passes, and tells the node of the *file* it stems from.
- Arrays are read-only and, above 64 bytes, aligned to 64 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .report import Report

__all__ = [
    "Dimension",
    "Graph",
    "MapType",
    "Model",
    "Node",
    "OptionalType",
    "SequenceType",
    "Source",
    "SparseTensor",
    "TensorType",
    "Type",
    "Value",
]

Dimension = int | str | None
"""A fixed size, the name of a symbolic one, or None where nothing is said."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor's dtype and shape. `dtype` None: not said. `shape` None: not even the rank is known."""

    dtype: np.dtype | None
    shape: tuple[Dimension, ...] | None = None


@dataclass(frozen=True, slots=True)
class SequenceType:
    """A sequence of `element`."""

    element: Type


@dataclass(frozen=True, slots=True)
class OptionalType:
    """An `element`, or nothing."""

    element: Type


@dataclass(frozen=True, slots=True)
class MapType:
    """A map from scalars of `key` to `value`."""

    key: np.dtype
    value: Type


Type = TensorType | SequenceType | OptionalType | MapType


@dataclass(frozen=True, slots=True)
class Value:
    """A named input, output or intermediate value with its declared type (None where nothing is declared)."""

    name: str
    type: Type | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SparseTensor:
    """A sparse attribute: `values` (nnz,), `indices` (nnz,) linear or (nnz, rank), of a tensor of `shape`."""

    values: np.ndarray
    indices: np.ndarray
    shape: tuple[int, ...]

    def dense(self) -> np.ndarray:
        """The whole tensor; unlisted elements are zero."""
        out = np.zeros(self.shape, self.values.dtype)
        if self.indices.ndim == 1:
            out.reshape(-1)[self.indices] = self.values
        else:
            out[tuple(self.indices.T)] = self.values
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One application of an operator.

    Attributes:
        op_type: The operator's name.
        domain: Its domain, `""` for the standard one (`"ai.onnx"` is normalised to it).
        inputs: Names, `""` where an optional input is left out.
        outputs: Names, `""` where an output is not wanted.
        attributes: Python values: int, float, str, numpy array, `Graph`, `Type`, or a tuple of these.
        name: As in the file, or the first named output where the file has none.
        path: Index in the sorted graph of the file, then in each function body or subgraph on the way down; where a node
            has several subgraphs the numbers run on, so paths are unique. The first entry is the *position* of the
            events and of `explain`.
        opset: Version of `domain` that decides the operator's meaning.
    """

    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, object]
    name: str
    path: tuple[int, ...]
    opset: int

    @property
    def position(self) -> int:
        """Index of the top-level node of the file that this node is, or is part of."""
        return self.path[0]

    @property
    def operator(self) -> str:
        """`"domain:Name"`, with the standard domain written out: `"ai.onnx:Add"`."""
        return f"{self.domain or 'ai.onnx'}:{self.op_type}"

    def subgraphs(self) -> Iterator[Graph]:
        """The graphs among the attributes."""
        for value in self.attributes.values():
            if isinstance(value, Graph):
                yield value
            elif isinstance(value, tuple):
                yield from (item for item in value if isinstance(item, Graph))


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A graph or subgraph.

    Attributes:
        inputs: Declared inputs, less those that are initializers as well.
        initializers: Weights and constants by name.
        overridable: Names of `initializers` that are inputs as well (IR version 4 and above): a call may replace them.
            Their declared types are in `types`.
        types: Declared types of intermediate values. Hints only: a file may lie about them.
    """

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    initializers: Mapping[str, np.ndarray] = field(default_factory=dict)
    overridable: frozenset[str] = frozenset()
    types: Mapping[str, Type] = field(default_factory=dict)

    def walk(self) -> Iterator[Node]:
        """Every node, subgraphs included, outer before inner."""
        for node in self.nodes:
            yield node
            for graph in node.subgraphs():
                yield from graph.walk()

    def outer_names(self) -> frozenset[str]:
        """Names that the graph, subgraphs included, takes from the graphs around it."""
        defined = {value.name for value in self.inputs} | set(self.initializers)
        outer: set[str] = set()
        for node in self.nodes:
            outer.update(name for name in node.inputs if name and name not in defined)
            for graph in node.subgraphs():
                outer.update(graph.outer_names() - defined)
            defined.update(node.outputs)
        outer.update(value.name for value in self.outputs if value.name not in defined)
        return frozenset(outer)


Source = str | tuple[str, str, str] | None
"""What `load` was given, as events carry it: a path as text, `("hf", repo, file)`, or None for bytes and protos."""


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A frozen graph with its weights. No actor, no device memory.

    Attributes:
        graph: The top-level graph, expanded and sorted.
        opsets: Version by domain, `""` the standard one, as imported by the file.
        node_count: Top-level nodes of the file, before any expansion or pass.
        source: See `Source`.
        known: Tells whether an operator `(domain, name, opset)` has a definition.
        newest: Newest version that the installed `onnx` package defines, for each domain of the model that it knows.
        optimize: Whether graph passes may be applied before it is compiled; off, the plain graph runs.
        prepare: What folding of constants is to spare: "speed" spares work on each call and may grow the weights, "memory" lets
            them grow by nothing.
    """

    graph: Graph
    opsets: Mapping[str, int]
    node_count: int
    ir_version: int = 0
    source: Source = None
    producer: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    known: Callable[[str, str, int], bool] = field(default=lambda domain, name, opset: True, repr=False)
    newest: Mapping[str, int] = field(default_factory=dict)
    optimize: bool = True
    prepare: str = "speed"

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The inputs that every call must give."""
        return self.graph.inputs

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The outputs, in the order in which `run` gives them."""
        return self.graph.outputs

    @property
    def opset(self) -> int:
        """Version of the standard domain, 0 where the model does not import it."""
        return self.opsets.get("", 0)

    def check(self, *, unchanged: Callable[[str, str, int], bool] | None = None) -> Report:
        """The pre-flight report: every missing operator at once, open dimensions, operators with counts, memory.

        Args:
            unchanged: See `Report.unvouched`.
        """
        from .report import check_model  # it needs the values of this file

        return check_model(self, unchanged)

    def __str__(self) -> str:
        from .report import describe

        return describe(self)

    def __repr__(self) -> str:  # every node and weight of the graph would be hundreds of pages
        source = "/".join(self.source) if isinstance(self.source, tuple) else self.source or "bytes"
        return f"<Model {source!r}: {self.node_count} nodes>"
