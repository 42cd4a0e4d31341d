"""A model file, bytes or ModelProto -> `Model`, and back for other runtimes. The only module that imports protobuf (`onnx`).

In this order: what kind of bytes these are (`sniff`), large tensors cut out by walking the wire format (`wire`), the rest
parsed by protobuf, protos decoded (`decode`, `tensors`, `external`), then sorted and expanded (`functions`). All of it is
synchronous and runs in a worker thread.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import onnx.defs
import onnx.helper
import onnx.numpy_helper
import onnx.shape_inference
from google.protobuf.message import DecodeError

from ..errors import InvalidModel
from .budget import Budget
from .decode import Decoder, RawFunction, RawGraph, normal_domain
from .dtypes import element_type_of
from .external import ExternalFiles, absolute, links_of
from .functions import Expander
from .model import Graph, MapType, Model, Node, OptionalType, SequenceType, SparseTensor, TensorType, Type, Value
from .sniff import SNIFFED_BYTES, explain_foreign
from .storage import BufferStorage, FileStorage, Storage
from .tensors import TensorReader
from .wire import MARKER_BYTES, Odd, Stripped, Truncated, strip

__all__ = ["Observe", "element_types", "external_locations", "read_model", "reference_outputs", "write_model"]

Observe = Callable[[str, Mapping[str, object]], None]
"""Called in the worker thread with a fact and its values: "read" (`bytes`, `cut_bytes`, `tensors`), "expanded" (`functions`),
"warning" (`text`)."""


def read_model(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO | onnx.ModelProto,
    *,
    known: Callable[[str, str, int], bool],
    allowed_links: Iterable[str] = frozenset(),
    base_dir: str | os.PathLike[str] | None = None,
    observe: Observe | None = None,
    budget: Budget | None = None,
) -> Model:
    """Reads a model.

    Args:
        source: A path, the bytes of a file, an open binary file (read from where it stands), or a ModelProto.
        known: Tells whether an operator (domain, name, version) has a definition; others are expanded where the standard
            gives them a function body. `version` is the one at which the operator got the meaning that it has at the
            model's opset, as far as the installed `onnx` knows.
        allowed_links: Paths of external data that may be links: those that the Hub client returned for this load.
        base_dir: Folder of external data; that of the file where a path is given.
        observe: See `Observe`.
        budget: Limits, the defaults of `Budget` where None.

    Returns:
        The frozen model. Its arrays are read-only and share nothing with the source.

    Raises:
        InvalidModel: These are not the bytes of a usable model; the text says what they are instead and what to do.
        TypeError: The source is of another type.
    """
    limits = budget or Budget()
    tell: Observe = observe or _ignore
    known = _by_meaning(known)
    with ExitStack() as stack:
        name: str | None = None
        storage: Storage | None = None
        folder = None if base_dir is None else os.fspath(base_dir)
        if isinstance(source, (str, os.PathLike)):
            name = os.fspath(source)
            if not isinstance(name, str):
                raise TypeError(f"a path must be text, not {type(name).__name__}")
            storage = stack.enter_context(_open(name))
            folder = str(Path(absolute(name)).parent) if folder is None else folder
        elif isinstance(source, (bytes, bytearray, memoryview)):
            storage = BufferStorage(source)
        elif not isinstance(source, onnx.ModelProto):
            storage = _storage_of_file(source)
        external = stack.enter_context(closing(ExternalFiles(folder, links_of(allowed_links), name)))
        try:
            return _read(source, storage, external, name, known, limits, tell)
        except RecursionError as error:
            raise InvalidModel("it is nested too deeply", source=name) from error
        except MemoryError as error:
            raise InvalidModel("it does not fit into memory", source=name) from error


def _ignore(fact: str, values: Mapping[str, object]) -> None:
    """Nobody listens."""


def _read(
    source: object,
    storage: Storage | None,
    external: ExternalFiles,
    name: str | None,
    known: Callable[[str, str, int], bool],
    budget: Budget,
    tell: Observe,
) -> Model:
    stripped = None
    if storage is None:
        assert isinstance(source, onnx.ModelProto)
        proto = source
    else:
        proto, stripped = _parse(storage, budget, name, tell)
    if not proto.HasField("graph") or not proto.HasField("ir_version"):
        lacks = "graph" if proto.HasField("ir_version") else "IR version"
        raise InvalidModel(
            f"this is no ONNX model: it has no {lacks}. If it is another protobuf file (a checkpoint, a tokenizer, a "
            "TensorFlow graph), export the model to ONNX.",
            source=name,
        )
    tensors = TensorReader(storage, stripped, external, budget, name)
    decoder = Decoder(tensors, budget, name)
    opsets = decoder.opsets(proto.opset_import, "the model")
    if not opsets and proto.ir_version < 3:
        opsets = {"": 1}  # before IR version 3 there was one opset
    if proto.ir_version > onnx.IR_VERSION:
        tell("warning", {"text": f"IR version {proto.ir_version} is newer than the installed onnx ({onnx.IR_VERSION})"})
    raw = decoder.graph(proto.graph)
    functions = {
        (normal_domain(decoder.text(item.domain)), decoder.text(item.name), decoder.text(item.overload)): cache(
            lambda item=item: decoder.function(item)
        )
        for item in proto.functions
    }
    if len(functions) < len(proto.functions):
        raise InvalidModel("it defines a function twice (same domain, name and overload)", source=name)

    def expand(standard: _Standard) -> tuple[Graph, int]:
        expander = Expander(functions, standard, known, opsets, proto.ir_version, budget, name)
        return expander.run(raw), expander.expanded

    plain = _Standard(decoder, None)
    graph, expanded = expand(plain)
    if plain.wanted_types:
        graph, expanded = expand(_Standard(decoder, raw.types))
    if storage is not None:
        storage.check_unchanged()
        cuts = stripped.cuts if stripped is not None else ()
        tell(
            "read",
            {"bytes": storage.size, "cut_bytes": sum(cut.stop - cut.start for cut in cuts), "tensors": len(raw.initializers)},
        )
    external.check_unchanged()
    tell("expanded", {"functions": expanded})
    domains = {*opsets, *(node.domain for node in graph.walk())}
    return Model(
        graph=graph,
        opsets=opsets,
        node_count=len(raw.nodes),
        ir_version=int(proto.ir_version),
        source=name,
        producer=f"{decoder.text(proto.producer_name)} {decoder.text(proto.producer_version)}".strip(),
        metadata={decoder.text(entry.key): decoder.text(entry.value) for entry in proto.metadata_props},
        known=known,
        newest={domain: newest for domain in domains if (newest := _newest(domain)) is not None},
    )


# -- bytes ---------------------------------------------------------------------------------------------------------


@contextmanager
def _open(name: str) -> Iterator[FileStorage]:
    """The regular file at a path. A link is followed: the path is the caller's own."""
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(name, flags)
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = "Write hf://owner/repository/file for a file on the Hub." if not Path(name).is_absolute() else "Check the path."
        raise InvalidModel(f"there is no such file. {hint}", source=name) from error
    except (OSError, ValueError) as error:
        hint = _folder_hint(name) if _is_folder(name) else f"it can't be opened: {error}"
        raise InvalidModel(hint, source=name) from error
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise InvalidModel(_folder_hint(name), source=name)
        if not stat.S_ISREG(mode):
            raise InvalidModel("this is not a regular file. Copy the model into a file first.", source=name)
        yield FileStorage(descriptor, name)
    finally:
        os.close(descriptor)


def _is_folder(name: str) -> bool:
    try:
        return Path(name).is_dir()
    except (OSError, ValueError):
        return False


def _folder_hint(name: str) -> str:
    files = sorted(str(path.relative_to(name)) for pattern in ("*.onnx", "*/*.onnx") for path in Path(name).glob(pattern))
    found = f"It holds {', '.join(files[:5])}; give one of these." if files else "It holds no .onnx file."
    return f"this is a folder, not a model file. {found}"


def _storage_of_file(source: Any) -> Storage:
    """An open binary file: read in place where it is a regular file, else read whole."""
    read = getattr(source, "read", None)
    if read is None:
        raise TypeError(
            f"a model is read from a path, bytes, an open binary file or an onnx.ModelProto, not {type(source).__name__}"
        )
    try:
        descriptor, origin = source.fileno(), source.tell()
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and isinstance(read(0), bytes):
            return FileStorage(descriptor, str(getattr(source, "name", "the file")), origin)
    except (AttributeError, OSError, ValueError):
        pass  # not backed by a descriptor: BytesIO, a socket's file, an archive member
    data = read()
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"the file gave {type(data).__name__}; open it in binary mode")
    return BufferStorage(data)


def _parse(
    storage: Storage, budget: Budget, name: str | None, tell: Observe
) -> tuple[onnx.ModelProto, Stripped | None]:
    foreign = explain_foreign(storage.read(0, min(storage.size, SNIFFED_BYTES)), storage.size)
    if foreign is not None:
        raise InvalidModel(foreign, source=name)
    stripped = None
    try:
        stripped = strip(storage, os.urandom(MARKER_BYTES), most=budget.rest_bytes)
    except Truncated as error:
        raise InvalidModel(_incomplete(storage.size, str(error)), source=name) from error
    except Odd as error:
        if storage.size > budget.rest_bytes:
            raise InvalidModel(
                f"{error}, so it has to be parsed in one go, and {storage.size} bytes are more than the budget of "
                f"{budget.rest_bytes} for that. Store large tensors as raw data or external data.",
                source=name,
            ) from error
        tell("warning", {"text": f"parsed in one go: {error}"})
    try:
        rest = storage.read(0, storage.size) if stripped is None else stripped.rest
        return onnx.ModelProto.FromString(rest), stripped
    except DecodeError as error:
        raise InvalidModel(_incomplete(storage.size, str(error)), source=name) from error


def external_locations(path: str | os.PathLike[str], *, budget: Budget | None = None) -> tuple[str, ...]:
    """The distinct locations of external data that a model file names, as written there. No weight is read.

    Raises:
        InvalidModel: These are not the bytes of a usable model.
    """
    name = os.fspath(path)
    with _open(name) as storage:
        proto, _ = _parse(storage, budget or Budget(), name, _ignore)
    found: dict[str, None] = {}
    graphs = [proto.graph]
    nodes = [node for function in proto.functions for node in function.node]
    while graphs or nodes:
        tensors: list[onnx.TensorProto] = []
        if graphs:
            graph = graphs.pop()
            nodes.extend(graph.node)
            tensors.extend(graph.initializer)
            sparse = list(graph.sparse_initializer)
        else:
            attributes = nodes.pop().attribute
            graphs.extend(each for one in attributes for each in (*([one.g] if one.HasField("g") else ()), *one.graphs))
            tensors.extend(each for one in attributes for each in (*([one.t] if one.HasField("t") else ()), *one.tensors))
            sparse = [each for one in attributes for each in one.sparse_tensors]
            sparse.extend(one.sparse_tensor for one in attributes if one.HasField("sparse_tensor"))
        tensors.extend(each for one in sparse for each in (one.values, one.indices))
        for tensor in tensors:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                found.update((entry.value, None) for entry in tensor.external_data if entry.key == "location")
    return tuple(found)


def _incomplete(size: int, why: str) -> str:
    return (
        f"these {size} bytes are not a whole ONNX model ({why}). A download that was cut short looks like this: compare "
        "the size with the original and fetch it again."
    )


# -- the standard --------------------------------------------------------------------------------------------------


@cache
def _newest(domain: str) -> int | None:
    """The newest version of a domain that the installed onnx defines, None where it defines none."""
    if domain == "":
        return int(onnx.defs.onnx_opset_version())
    return max((schema.since_version for schema in _schemas() if schema.domain == domain), default=None)


def _by_meaning(known: Callable[[str, str, int], bool]) -> Callable[[str, str, int], bool]:
    """`known`, asked for the version that gave an operator its meaning.

    So a model of a later opset than the definitions were written for runs where its operators did not change since.
    Above what the installed onnx defines nobody can tell; the report names those operators.
    """

    def known_meaning(domain: str, name: str, opset: int) -> bool:
        newest = _newest(domain)
        opset = opset if newest is None else min(opset, newest)
        schema = _schema(domain, name, opset)
        return known(domain, name, opset if schema is None else int(schema.since_version))

    return known_meaning


@cache
def _schemas() -> tuple[Any, ...]:
    onnx.defs.has("Identity")  # the first question fills onnx's table: with the list at once, one long hold of the lock
    return tuple(onnx.defs.get_all_schemas())


@cache
def _schema(domain: str, name: str, opset: int) -> Any:
    """The schema that counts for an opset, None where the standard has none."""
    try:
        return onnx.defs.get_schema(name, opset, domain)
    except onnx.defs.SchemaError:
        return None


class _Standard:
    """See `functions.Standard`. Types are followed only when `hints` is given: few models need them.

    Attributes:
        wanted_types: A body was not given because the types of the inputs were not followed.
    """

    def __init__(self, decoder: Decoder, hints: Mapping[str, Type] | None) -> None:
        self._decoder = decoder
        self._hints = hints
        self._types: dict[str, Any] = {}
        self._graphs: dict[str, RawGraph] = {}
        self.wanted_types = False

    def body(self, node: Node, graphs: Mapping[str, RawGraph]) -> RawFunction | None:
        """The function body of an operator for this very node, None where it has none or its input types are unknown."""
        schema = _schema(node.domain, node.op_type, node.opset)
        if schema is None:
            return None
        versions = [version for version in schema.function_opset_versions if version <= node.opset]
        if versions:
            return self._decode(schema.get_function_with_opset_version(max(versions)), schema)
        versions = [version for version in schema.context_dependent_function_opset_versions if version <= node.opset]
        if not versions:
            return None
        if self._hints is None:
            self.wanted_types = True
            return None
        types = [self._types.get(name) if name else onnx.TypeProto() for name in node.inputs]
        proto = _node_proto(node, graphs)
        if proto is None or any(item is None for item in types):
            return None
        found = schema.get_context_dependent_function_with_opset_version(
            max(versions),
            proto.SerializeToString(),
            [item.SerializeToString() for item in types if item is not None],
        )
        return self._decode(found, schema) if found else None

    def _decode(self, data: Any, schema: Any) -> RawFunction:
        """A body of the standard. Defaults of its attributes are in the schema, not in the function."""
        proto = data if isinstance(data, onnx.FunctionProto) else onnx.FunctionProto.FromString(data)
        body = self._decoder.function(proto)
        defaults = {
            name: self._decoder.attribute(attribute.default_value, f"{schema.name}, attribute {name!r}", 0)
            for name, attribute in schema.attributes.items()
            if attribute.default_value.name
        }
        return replace(body, defaults={**defaults, **body.defaults})

    def declare(self, values: Iterable[Value], initializers: Mapping[str, np.ndarray]) -> None:
        """Notes the types of names that are about to be used."""
        if self._hints is None:
            return
        for value in values:
            self._note(value.name, value.type)
        for name, array in initializers.items():
            self._note(name, TensorType(array.dtype, array.shape))

    def _note(self, name: str, declared: Type | None) -> None:
        proto = None if declared is None else _type_proto(declared)
        if proto is None:
            self._types.pop(name, None)
        else:
            self._types[name] = proto

    def infer(self, node: Node) -> None:
        """Notes the types of the node's outputs, as far as they follow from its inputs or are declared."""
        if self._hints is None:
            return
        found: dict[str, Any] = {}
        schema = _schema(node.domain, node.op_type, node.opset)
        proto = None if schema is None else _node_proto(node, {})
        inputs = {name: self._types[name] for name in node.inputs if name in self._types}
        if schema is not None and proto is not None and all(name in inputs for name in node.inputs if name):
            try:
                found = onnx.shape_inference.infer_node_outputs(
                    schema, proto, inputs, opset_imports=[onnx.helper.make_opsetid(node.domain, node.opset)]
                )
            except Exception:  # the C++ side raises several kinds; without types the node stays as it is
                found = {}
        for name in node.outputs:
            inferred = found.get(name)
            if inferred is not None and inferred.WhichOneof("value"):
                self._types[name] = inferred
            elif name:
                self._note(name, self._hints.get(name))


def _type_proto(declared: Type) -> Any:
    """A TypeProto, None where the element type is not known."""
    if isinstance(declared, TensorType):
        if declared.dtype is None:
            return None
        return onnx.helper.make_tensor_type_proto(element_type_of(declared.dtype), declared.shape)
    if isinstance(declared, MapType):
        inner = _type_proto(declared.value)
        return None if inner is None else onnx.helper.make_map_type_proto(element_type_of(declared.key), inner)
    inner = _type_proto(declared.element)
    if inner is None:
        return None
    if isinstance(declared, SequenceType):
        return onnx.helper.make_sequence_type_proto(inner)
    assert isinstance(declared, OptionalType)
    return onnx.helper.make_optional_type_proto(inner)


def _node_proto(node: Node, graphs: Mapping[str, RawGraph]) -> Any:
    """A NodeProto of the node, None where an attribute can't be turned back (a graph that is not among `graphs`)."""
    proto = onnx.helper.make_node(node.op_type, node.inputs, node.outputs, node.name, domain=node.domain)
    for name, value in node.attributes.items():
        if isinstance(value, Graph):
            if name not in graphs:
                return None
            proto.attribute.append(onnx.helper.make_attribute(name, graphs[name].proto))
        elif isinstance(value, np.ndarray):
            proto.attribute.append(onnx.helper.make_attribute(name, onnx.numpy_helper.from_array(value)))
        elif isinstance(value, tuple):
            if not all(isinstance(item, (int, float, str, bytes)) for item in value):
                return None
            kind = None if value else onnx.AttributeProto.INTS
            proto.attribute.append(onnx.helper.make_attribute(name, value, attr_type=kind))
        elif isinstance(value, (TensorType, SequenceType, OptionalType, MapType)):
            inner = _type_proto(value)
            if inner is None:
                return None
            proto.attribute.append(onnx.helper.make_attribute(name, inner))
        elif isinstance(value, SparseTensor):
            return None
        else:
            proto.attribute.append(onnx.helper.make_attribute(name, value))
    return proto


def element_types(domain: str, name: str, version: int) -> frozenset[str]:
    """The types that an operator's inputs and outputs may have, as ONNX writes them: `"tensor(float)"`; empty where unknown."""
    schema = _schema(domain, name, version)
    if schema is None:
        return frozenset()
    return frozenset(str(each) for item in (*schema.inputs, *schema.outputs) for each in item.types)


# -- back, for other runtimes --------------------------------------------------------------------------------------


def write_model(
    model: Model,
    path: str | os.PathLike[str],
    outputs: Iterable[str],
    constants: Mapping[str, np.ndarray] | None = None,
    widened: Iterable[str] = (),
) -> None:
    """Write a model as it was read, expanded and sorted, for another runtime. Large weights go to a file beside it.

    Args:
        model: What to write.
        path: Where to.
        outputs: Names of values of the top-level graph that it gives.
        constants: Inputs that become part of the file.
        widened: Those of `outputs` that are given as float32, because numpy has not their dtype.
    """
    proto = _Writer(model).model(tuple(outputs), constants or {}, frozenset(widened))
    large = sum(tensor.ByteSize() for tensor in proto.graph.initializer) > _INLINE_BYTES
    onnx.save_model(proto, os.fspath(path), save_as_external_data=large, location=f"{Path(path).name}.data")


def reference_outputs(model: Model, outputs: Iterable[str], inputs: Mapping[str, Any]) -> list[Any]:
    """Values of the top-level graph as onnx's reference evaluator computes them."""
    from onnx.reference import ReferenceEvaluator  # slow to import, and needed by nothing else

    proto = _Writer(model).model(tuple(outputs), {}, frozenset())
    return list(ReferenceEvaluator(proto).run(None, dict(inputs)))


_INLINE_BYTES = 1 << 30  # a protobuf ends at two of these


class _Writer:
    """Graphs to protos.

    A file has one version per domain, but nodes of expanded functions may be of others. Where the operator's signature
    is another one by then, the node becomes a call of a function of its own, which imports its version.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._opsets = dict(model.opsets)
        self._functions: list[Any] = []

    def model(self, outputs: tuple[str, ...], constants: Mapping[str, np.ndarray], widened: frozenset[str]) -> Any:
        top = self._model.graph
        names = [f"{name}/float" if name in widened else name for name in outputs]
        casts = [
            onnx.helper.make_node("Cast", [name], [f"{name}/float"], to=onnx.TensorProto.FLOAT) for name in outputs if name in widened
        ]
        inputs = tuple(value for value in top.inputs if value.name not in constants)
        weights = {**top.initializers, **constants}
        graph = self._graph(replace(top, inputs=inputs, initializers=weights, outputs=tuple(map(Value, names))), casts)
        self._opsets.setdefault("", 17)
        imports = {**self._opsets, **({_VERSIONS: 1} if self._functions else {})}
        return onnx.helper.make_model(
            graph,
            opset_imports=[onnx.helper.make_opsetid(domain, version) for domain, version in imports.items()],
            functions=self._functions,
            ir_version=min(max(self._model.ir_version, 8), onnx.IR_VERSION),
        )

    def _graph(self, graph: Graph, more: Iterable[Any] = ()) -> Any:
        tensors = [onnx.numpy_helper.from_array(array, name) for name, array in graph.initializers.items()]
        nodes = [*map(self._node, graph.nodes), *more]
        inputs, outputs = (list(map(_value_proto, values)) for values in (graph.inputs, graph.outputs))
        return onnx.helper.make_graph(nodes, graph.name or "graph", inputs, outputs, tensors)

    def _node(self, node: Node) -> Any:
        # Unnamed: onnxruntime wants names of nodes to be unique, the standard does not.
        proto = onnx.helper.make_node(node.op_type, node.inputs, node.outputs, domain=node.domain)
        for name, value in node.attributes.items():
            proto.attribute.append(self._attribute(name, value))
        version = self._opsets.setdefault(node.domain, node.opset)
        if any(True for _ in node.subgraphs()) or _signature(node, version) == _signature(node, node.opset):
            return proto
        name = f"{node.op_type}_{len(self._functions)}"
        used = list(dict.fromkeys(filter(None, node.inputs)))
        given = list(filter(None, node.outputs))
        imports = [onnx.helper.make_opsetid(node.domain, node.opset)]
        self._functions.append(onnx.helper.make_function(_VERSIONS, name, used, given, [proto], imports))
        return onnx.helper.make_node(name, used, given, domain=_VERSIONS)

    def _attribute(self, name: str, value: object) -> Any:
        if isinstance(value, Graph):
            value = self._graph(value)
        elif isinstance(value, np.ndarray):
            value = onnx.numpy_helper.from_array(value)
        elif isinstance(value, SparseTensor):
            name, value = "value", onnx.numpy_helper.from_array(value.dense())  # of Constant, which has no other
        elif isinstance(value, (TensorType, SequenceType, OptionalType, MapType)):
            value = _type_proto(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], np.ndarray):
            value = list(map(onnx.numpy_helper.from_array, value))
        elif isinstance(value, tuple) and value and isinstance(value[0], Graph):
            value = list(map(self._graph, value))
        return onnx.helper.make_attribute(name, value, attr_type=onnx.AttributeProto.INTS if value == () else None)


_VERSIONS = "transmuter.versions"


def _signature(node: Node, version: int) -> object:
    """Inputs and attributes of the operator at a version; None where the standard does not have it."""
    schema = _schema(node.domain, node.op_type, version)
    return None if schema is None else ([item.name for item in schema.inputs], sorted(schema.attributes))


def _value_proto(value: Value) -> Any:
    declared = None if value.type is None else _type_proto(value.type)
    return onnx.ValueInfoProto(name=value.name) if declared is None else onnx.helper.make_value_info(value.name, declared)
