"""Protos -> raw values: Python attributes and arrays, names as in the file, nothing sorted, nothing expanded yet.

Protos come in as plain objects; this module does not import protobuf. Source: onnx.proto.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import InvalidModel
from .budget import Budget
from .dtypes import dtype_of
from .model import MapType, OptionalType, SequenceType, TensorType, Type, Value
from .tensors import TensorReader, name_text

__all__ = ["Decoder", "RawFunction", "RawGraph", "RawNode", "Reference", "normal_domain"]


@dataclass(frozen=True, slots=True)
class Reference:
    """An attribute inside a function body that takes the value of the call's attribute `name`."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class RawNode:
    """A node as in the file. Graphs among the attributes are `RawGraph`."""

    op_type: str
    domain: str
    overload: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, object]
    name: str

    def subgraphs(self) -> list[RawGraph]:
        """The graphs among the attributes, in the order of the file."""
        found: list[RawGraph] = []
        for value in self.attributes.values():
            if isinstance(value, RawGraph):
                found.append(value)
            elif isinstance(value, tuple):
                found.extend(item for item in value if isinstance(item, RawGraph))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class RawGraph:
    """A graph as in the file. `proto` is kept for context-dependent function bodies, which want protos."""

    name: str
    nodes: tuple[RawNode, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    initializers: Mapping[str, np.ndarray]
    types: Mapping[str, Type]
    proto: Any = field(repr=False, default=None)


@dataclass(frozen=True, slots=True, eq=False)
class RawFunction:
    """A function body: `required` attributes have no default, those of `defaults` do."""

    name: str
    domain: str
    overload: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    required: tuple[str, ...]
    defaults: Mapping[str, object]
    nodes: tuple[RawNode, ...]
    opsets: Mapping[str, int]
    types: Mapping[str, Type]


def normal_domain(domain: str) -> str:
    """`""` for both spellings of the standard domain."""
    return "" if domain == "ai.onnx" else domain


class Decoder:
    """Turns the protos of one model into raw values, counting what they cost.

    Args:
        tensors: Reads TensorProtos.
        budget: Limits.
        source: The model, as errors call it.
    """

    def __init__(self, tensors: TensorReader, budget: Budget, source: str | None) -> None:
        self._tensors = tensors
        self._budget = budget
        self._source = source
        self._nodes = 0

    def _bad(self, text: str) -> InvalidModel:
        return InvalidModel(text, source=self._source)

    def text(self, value: object) -> str:
        """A protobuf string field. Raises InvalidModel where it is not UTF-8."""
        return name_text(value, self._source)

    def opsets(self, imports: Any, where: str) -> dict[str, int]:
        """Version by domain. Raises InvalidModel when a domain is imported in two versions."""
        found: dict[str, int] = {}
        for entry in imports:
            domain = normal_domain(self.text(entry.domain))
            version = int(entry.version)
            if found.setdefault(domain, version) != version:
                raise self._bad(
                    f"{where} imports two versions of domain {domain or 'ai.onnx'!r}: {found[domain]} and {version}"
                )
        return found

    def graph(self, proto: Any, depth: int = 0) -> RawGraph:
        """A GraphProto with everything in it.

        Raises:
            InvalidModel: Over budget, or something in it is not what ONNX allows.
        """
        if depth > self._budget.nesting:
            raise self._bad(f"subgraphs are nested more than {self._budget.nesting} deep")
        name = self.text(proto.name)
        initializers: dict[str, np.ndarray] = {}
        for tensor in proto.initializer:
            self._initializer(initializers, self.text(tensor.name), self._tensors.tensor(tensor), name)
        for sparse in proto.sparse_initializer:
            self._initializer(initializers, *self._tensors.dense(sparse), name)
        types: dict[str, Type] = {}
        for info in proto.value_info:
            declared = self.type(info.type)
            if declared is not None:
                types[self.text(info.name)] = declared
        return RawGraph(
            name,
            tuple(self.node(node, index, depth) for index, node in enumerate(proto.node)),
            tuple(self._value(info) for info in proto.input),
            tuple(self._value(info) for info in proto.output),
            initializers,
            types,
            proto,
        )

    def _initializer(self, found: dict[str, np.ndarray], name: str, array: np.ndarray, graph: str) -> None:
        if not name:
            raise self._bad(f"graph {graph!r} has an initializer without a name")
        if name in found:
            raise self._bad(f"graph {graph!r} has two initializers named {name!r}")
        found[name] = array

    def _value(self, info: Any) -> Value:
        return Value(self.text(info.name), self.type(info.type))

    def type(self, proto: Any, depth: int = 0) -> Type | None:
        """A TypeProto; None where it says nothing, or something that this ONNX does not know: it is only a hint."""
        if depth > self._budget.nesting:
            raise self._bad(f"types are nested more than {self._budget.nesting} deep")
        kind = proto.WhichOneof("value")
        if kind in ("tensor_type", "sparse_tensor_type"):
            tensor = getattr(proto, kind)
            shape = tuple(self._dimension(dim) for dim in tensor.shape.dim) if tensor.HasField("shape") else None
            return TensorType(_known_dtype(tensor.elem_type), shape)
        if kind == "sequence_type":
            return SequenceType(self.type(proto.sequence_type.elem_type, depth + 1) or TensorType(None))
        if kind == "optional_type":
            return OptionalType(self.type(proto.optional_type.elem_type, depth + 1) or TensorType(None))
        if kind == "map_type":
            key = _known_dtype(proto.map_type.key_type)
            inner = self.type(proto.map_type.value_type, depth + 1)
            return None if key is None else MapType(key, inner or TensorType(None))
        return None

    def _dimension(self, proto: Any) -> int | str | None:
        kind = proto.WhichOneof("value")
        if kind == "dim_value":
            size = int(proto.dim_value)
            return size if size >= 0 else None  # some exporters write -1 for "any"
        return (self.text(proto.dim_param) or None) if kind == "dim_param" else None

    def node(self, proto: Any, index: int, depth: int) -> RawNode:
        """A NodeProto. `index` names it in errors where it has no name."""
        self._nodes += 1
        if self._nodes > self._budget.nodes:
            raise self._bad(f"there are more than {self._budget.nodes} nodes, the budget")
        name, op_type = self.text(proto.name), self.text(proto.op_type)
        what = f"{op_type} node {name!r}" if name else f"{op_type} node {index}"
        if not op_type:
            raise self._bad(f"node {name or index!r} names no operator")
        attributes: dict[str, object] = {}
        for attribute in proto.attribute:
            key = self.text(attribute.name)
            if not key or key in attributes:
                raise self._bad(f"{what} has attribute {key!r} twice" if key else f"{what} has an attribute without a name")
            attributes[key] = self.attribute(attribute, f"{what}, attribute {key!r}", depth)
        return RawNode(
            op_type,
            normal_domain(self.text(proto.domain)),
            self.text(proto.overload),
            tuple(self.text(item) for item in proto.input),
            tuple(self.text(item) for item in proto.output),
            attributes,
            name,
        )

    def attribute(self, proto: Any, what: str, depth: int) -> object:
        """The value of an AttributeProto: int, float, str (bytes if not UTF-8), array, graph, type, sparse tensor,
        a tuple of these, or a `Reference`. An empty list is told by the attribute's type.
        """
        reference = self.text(proto.ref_attr_name)
        if reference:
            return Reference(reference)
        kind = proto.type or _guess_kind(proto)
        if kind == 1:
            return float(proto.f)
        if kind == 2:
            return int(proto.i)
        if kind == 3:
            return _string(proto.s)
        if kind == 4:
            return self._tensors.tensor(proto.t, what)
        if kind == 5:
            return self.graph(proto.g, depth + 1)
        if kind == 6:
            return tuple(float(item) for item in proto.floats)
        if kind == 7:
            return tuple(int(item) for item in proto.ints)
        if kind == 8:
            return tuple(_string(item) for item in proto.strings)
        if kind == 9:
            return tuple(self._tensors.tensor(item, what) for item in proto.tensors)
        if kind == 10:
            return tuple(self.graph(item, depth + 1) for item in proto.graphs)
        if kind == 11:
            return self._tensors.sparse(proto.sparse_tensor, what)[1]
        if kind == 12:
            return tuple(self._tensors.sparse(item, what)[1] for item in proto.sparse_tensors)
        if kind == 13:
            return self._attribute_type(proto.tp, what)
        if kind == 14:
            return tuple(self._attribute_type(item, what) for item in proto.type_protos)
        raise self._bad(f"{what} has no value, or a kind of value (number {kind}) that ONNX does not define")

    def _attribute_type(self, proto: Any, what: str) -> Type:
        found = self.type(proto)
        if found is None:
            raise self._bad(f"{what} is a type that says nothing")
        return found

    def function(self, proto: Any) -> RawFunction:
        """A FunctionProto.

        Raises:
            InvalidModel: As `graph`, or its inputs or outputs repeat.
        """
        name = self.text(proto.name)
        defaults: dict[str, object] = {}
        for attribute in proto.attribute_proto:
            key = self.text(attribute.name)
            defaults[key] = self.attribute(attribute, f"function {name!r}, attribute {key!r}", 0)
        types: dict[str, Type] = {}
        for info in proto.value_info:
            declared = self.type(info.type)
            if declared is not None:
                types[self.text(info.name)] = declared
        return RawFunction(
            name,
            normal_domain(self.text(proto.domain)),
            self.text(proto.overload),
            tuple(self.text(item) for item in proto.input),
            tuple(self.text(item) for item in proto.output),
            tuple(self.text(item) for item in proto.attribute),
            defaults,
            tuple(self.node(node, index, 0) for index, node in enumerate(proto.node)),
            self.opsets(proto.opset_import, f"function {name!r}"),
            types,
        )


def _known_dtype(number: int) -> np.dtype | None:
    try:
        return dtype_of(number)
    except KeyError:
        return None


def _string(value: bytes) -> str | bytes:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value


# AttributeProto fields in the order in which a value without a type is looked for, with their type numbers
_SINGLE = (("f", 1), ("i", 2), ("s", 3), ("t", 4), ("g", 5), ("sparse_tensor", 11), ("tp", 13))
_REPEATED = (
    ("floats", 6), ("ints", 7), ("strings", 8), ("tensors", 9), ("graphs", 10), ("sparse_tensors", 12), ("type_protos", 14)
)


def _guess_kind(proto: Any) -> int:
    """The type of an attribute that does not say it (files before IR version 2); 0 where nothing is set."""
    found = [kind for name, kind in _SINGLE if proto.HasField(name)]
    found += [kind for name, kind in _REPEATED if len(getattr(proto, name))]
    return found[0] if len(found) == 1 else 0
