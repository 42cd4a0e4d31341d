"""The pre-flight report: what a model needs, before anything is traced. Every missing operator is listed at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import UnsupportedModel
from .dtypes import STRING, onnx_name
from .model import Dimension, Graph, MapType, Model, SequenceType, SparseTensor, TensorType, Type, Value
from .tensors import element_bits

__all__ = ["DynamicDimension", "OperatorUse", "Report", "check_model", "describe", "describe_type"]

_NAMES = 5  # node names that are kept per operator


@dataclass(frozen=True, slots=True)
class OperatorUse:
    """An operator and where the model uses it.

    Attributes:
        domain: `""` is the standard domain.
        opset: Version of the domain that decides the meaning.
        count: Nodes, those in subgraphs and expanded functions included.
        nodes: Names of the first few.
    """

    domain: str
    op_type: str
    opset: int
    count: int
    nodes: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(repr(name) for name in self.nodes)
        more = f" and {self.count - len(self.nodes)} more" if self.count > len(self.nodes) else ""
        return f"{self.domain or 'ai.onnx'}:{self.op_type} (opset {self.opset}), {_nodes(self.count)}: {names}{more}"


@dataclass(frozen=True, slots=True)
class DynamicDimension:
    """A dimension of an input that the graph leaves open: its axis, and its symbolic name where it has one."""

    input: str
    axis: int
    name: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """What `Model.check()` found. `print(report)` reads well.

    Attributes:
        operators: Every operator with its uses, the most frequent first.
        missing: Those without a definition.
        unvouched: Those of a domain version that is newer than the installed `onnx` defines: their meaning may have
            changed, and nobody here can tell. `check(unchanged=...)` vouches for operators.
        dynamic: Open dimensions of the inputs.
        unranked: Inputs of which not even the rank is declared.
        weight_bytes: Bytes of weights and constants as ONNX stores them.
        prepared_bytes: Bytes of the same in memory, where packed 4-bit and 2-bit elements take one byte each.
        notes: Things that are worth knowing and do not stop the model.
    """

    title: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    opsets: tuple[tuple[str, int], ...]
    node_count: int
    operators: tuple[OperatorUse, ...]
    missing: tuple[OperatorUse, ...]
    unvouched: tuple[OperatorUse, ...]
    dynamic: tuple[DynamicDimension, ...]
    unranked: tuple[str, ...]
    weight_bytes: int
    prepared_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every operator has a definition that counts for the model's opsets."""
        return not self.missing and not self.unvouched

    def raise_for_missing(self) -> None:
        """Does nothing when all is well.

        Raises:
            UnsupportedModel: Lists every operator that is missing or can't be vouched for.
        """
        if self.ok:
            return
        listed = (*self.missing, *self.unvouched)
        raise UnsupportedModel(
            "\n".join((f"{self.title} can't run:", *self._problems())),
            missing=tuple((use.domain, use.op_type, use.opset, use.nodes) for use in listed),
        )

    def _problems(self) -> Iterator[str]:
        if self.missing:
            yield f"{_plural(len(self.missing), 'operator')} without a definition:"
            yield from (f"  {use}" for use in self.missing)
            yield "`transmuter ops` lists what there is; an exporter can often avoid an operator at another opset."
        if self.unvouched:
            yield "newer than the installed onnx package, so their meaning may have changed:"
            yield from (f"  {use}" for use in self.unvouched)
            yield "Export with a lower opset, or upgrade onnx and transmuter-async."

    def __str__(self) -> str:
        lines = [self.title, *_signature(self.inputs, self.outputs)]
        lines.append(f"opsets      {', '.join(f'{domain} {version}' for domain, version in self.opsets) or 'none'}")
        used = ", ".join(f"{use.op_type} {use.count}" for use in self.operators[:8])
        more = f", and {len(self.operators) - 8} more" if len(self.operators) > 8 else ""
        total = sum(use.count for use in self.operators)
        lines.append(f"nodes       {self.node_count} in the file, {total} with subgraphs and functions: {used}{more}")
        lines.append(f"weights     {_bytes(self.weight_bytes)} in ONNX, {_bytes(self.prepared_bytes)} in memory")
        if self.dynamic:
            named: dict[str, list[str]] = {}
            for open_ in self.dynamic:
                named.setdefault(open_.name or "?", []).append(f"{open_.input}[{open_.axis}]")
            lines.append("dynamic     " + "; ".join(f"{name}: {', '.join(places)}" for name, places in named.items()))
        if self.unranked:
            lines.append(f"any rank    {', '.join(self.unranked)}")
        lines.extend(f"note        {note}" for note in self.notes)
        lines.extend(self._problems())
        if self.ok:
            lines.append("ok          every operator has a definition")
        return "\n".join(lines)


def _never(domain: str, op_type: str, opset: int) -> bool:
    """Vouches for nothing."""
    return False


def check_model(model: Model, unchanged: Callable[[str, str, int], bool] | None = None) -> Report:
    """Looks through a model.

    Args:
        model: What to look through.
        unchanged: Vouches that an operator `(domain, name, opset)` of a version that the installed onnx does not define
            means what it meant in the newest that it does.
    """
    vouched = unchanged or _never
    counts: dict[tuple[str, str, int], list[str]] = {}
    for node in model.graph.walk():
        counts.setdefault((node.domain, node.op_type, node.opset), []).append(node.name)
    uses = tuple(
        OperatorUse(*key, len(names), tuple(names[:_NAMES]))
        for key, names in sorted(counts.items(), key=lambda item: (-len(item[1]), item[0]))
    )
    missing = tuple(use for use in uses if not model.known(use.domain, use.op_type, use.opset))
    newer = tuple(
        use
        for use in uses
        if use not in missing
        and use.opset > model.newest.get(use.domain, use.opset)
        and not vouched(use.domain, use.op_type, use.opset)
    )
    dynamic: list[DynamicDimension] = []
    unranked: list[str] = []
    for value in model.inputs:
        if not isinstance(value.type, TensorType) or value.type.shape is None:
            unranked.append(value.name)
            continue
        for axis, dim in enumerate(value.type.shape):
            if not isinstance(dim, int):
                dynamic.append(DynamicDimension(value.name, axis, dim))
    stored, prepared = _weight_bytes(model.graph)
    return Report(
        _title(model),
        model.inputs,
        model.outputs,
        tuple((domain or "ai.onnx", version) for domain, version in model.opsets.items()),
        model.node_count,
        uses,
        missing,
        newer,
        tuple(dynamic),
        tuple(unranked),
        stored,
        prepared,
        tuple(_notes(model, uses)),
    )


def _notes(model: Model, uses: tuple[OperatorUse, ...]) -> Iterator[str]:
    for domain, version in model.opsets.items():
        newest = model.newest.get(domain)
        if newest is not None and version > newest:
            used = any(use.domain == domain for use in uses)
            yield (
                f"the model imports {domain or 'ai.onnx'} {version}, the installed onnx package knows up to {newest}"
                f"{'' if used else ' (no operator of that domain is used)'}"
            )
    if model.graph.overridable:
        count = len(model.graph.overridable)
        yield f"{_plural(count, 'initializer')} may be replaced by a call: {', '.join(sorted(model.graph.overridable)[:5])}"


def _arrays(graph: Graph) -> Iterator[np.ndarray]:
    yield from graph.initializers.values()
    for node in graph.nodes:
        for value in node.attributes.values():
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, np.ndarray):
                    yield item
                elif isinstance(item, SparseTensor):
                    yield item.values
                    yield item.indices
                elif isinstance(item, Graph):
                    yield from _arrays(item)


def _weight_bytes(graph: Graph) -> tuple[int, int]:
    """Bytes of all different arrays: as ONNX stores them, and in memory."""
    stored = prepared = 0
    seen: set[int] = set()
    for array in _arrays(graph):
        if id(array) in seen:
            continue
        seen.add(id(array))
        if array.dtype == STRING:
            texts = [str(item) for item in array.reshape(-1)]
            stored += sum(len(text.encode()) for text in texts)
            prepared += array.nbytes + sum(49 + len(text) for text in texts)
        else:
            stored += (array.size * element_bits(array.dtype) + 7) // 8
            prepared += array.nbytes
    return stored, prepared


# -- text ----------------------------------------------------------------------------------------------------------


def describe(model: Model) -> str:
    """What `print(model)` shows."""
    stored, prepared = _weight_bytes(model.graph)
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in model.opsets.items()) or "none"
    held = f"{_bytes(stored)} of weights" + (f", {_bytes(prepared)} in memory" if stored != prepared else "")
    lines = [f"{_title(model)}: {_nodes(model.node_count)}, {held}", f"opsets      {opsets}"]
    if model.producer:
        lines.append(f"producer    {model.producer}")
    return "\n".join((*lines, *_signature(model.inputs, model.outputs)))


def describe_type(declared: Type | None) -> str:
    """A type in a few characters: `float[batch, 3, ?]`, `seq(int64[?])`."""
    if declared is None:
        return "?"
    if isinstance(declared, TensorType):
        name = "?" if declared.dtype is None else onnx_name(declared.dtype)
        if declared.shape is None:
            return f"{name}[...]"
        return f"{name}[{', '.join(_dimension(dim) for dim in declared.shape)}]"
    if isinstance(declared, MapType):
        return f"map({onnx_name(declared.key)}, {describe_type(declared.value)})"
    word = "seq" if isinstance(declared, SequenceType) else "optional"
    return f"{word}({describe_type(declared.element)})"


def _dimension(dim: Dimension) -> str:
    return "?" if dim is None else str(dim)


def _signature(inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> Iterator[str]:
    for word, values in (("input", inputs), ("output", outputs)):
        yield from (f"{word:<12}{value.name}: {describe_type(value.type)}" for value in values)


def _title(model: Model) -> str:
    source = model.source
    if source is None:
        return f"Model {model.graph.name!r}" if model.graph.name else "Model"
    return "Model " + (source if isinstance(source, str) else "://".join(("hf", "/".join(source[1:]))))


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _nodes(count: int) -> str:
    return _plural(count, "node")


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
