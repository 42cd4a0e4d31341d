"""Where a model first gives something else than another runtime.

Between two nodes of the sorted graph the values that later nodes still read make up a cut. If they agree with the
oracle's, what is wrong comes later; if not, it came before. So halving finds a node whose inputs agree and whose outputs do
not, in as many runs as the number of nodes has binary digits.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from transmuter_async.errors import InputError, MisuseError
from transmuter_async.functions import run_sync
from transmuter_async.graph import Model, Node, Value, reference_outputs, write_model
from transmuter_async.sources import is_repository, read_local

if TYPE_CHECKING:
    import onnx  # for the annotation only: protobuf is the reader's business

__all__ = ["ORACLES", "Comparison", "Difference", "compare", "difference"]

ORACLES = ("onnxruntime", "reference", "host")

TOLERANCES = {"float64": (1e-7, 1e-9), "float32": (1e-3, 1e-4), "float16": (1e-2, 1e-2), "bfloat16": (5e-2, 5e-2)}
"""(relative, absolute) by dtype. Whole models are compared, in which roundings add up."""
NARROW = (1.3e-1, 1e-1)
"""For floats of 8 and 4 bits: a step of e4m3."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor on both sides.

    Attributes:
        name: Of the tensor.
        same: Whether it agrees within the tolerance.
        why: In words, empty where it agrees.
        count: Elements that differ.
        size: Elements that there are.
        largest: The largest absolute difference of finite numbers; None where the tensors are not numbers of one shape.
        index: Where `ours` and `theirs` are furthest apart.
        ours: Our element there.
        theirs: The oracle's.
    """

    name: str
    same: bool
    why: str = ""
    count: int = 0
    size: int = 0
    largest: float | None = None
    index: tuple[int, ...] | None = None
    ours: Any = None
    theirs: Any = None

    def __str__(self) -> str:
        if self.same:
            return f"{self.name}: same" + ("" if self.largest is None else f", largest difference {self.largest:.3g}")
        at = "" if self.index is None else f"; at {list(self.index)} it is {self.ours}, the oracle has {self.theirs}"
        return f"{self.name}: {self.why}{at}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found. `print(comparison)` reads well.

    Attributes:
        oracle: "onnxruntime", "reference" or "host".
        same: Whether all outputs agree.
        outputs: The graph's outputs.
        first: The first tensor that differs although everything that its node reads agrees; None where all agree.
        node: The node that gave it, by name; None as above.
        operator: `"ai.onnx:Softmax"`.
        position: Of the node, in the file.
        opset: The version that decides the operator's meaning.
        attributes: Of the node, in words.
        inputs: What it reads, in words: name, dtype, shape, smallest and largest element.
        runs: How often the model ran to find it.
    """

    oracle: str
    same: bool
    outputs: tuple[Difference, ...]
    first: Difference | None = None
    node: str | None = None
    operator: str | None = None
    position: int | None = None
    opset: int | None = None
    attributes: str = ""
    inputs: tuple[str, ...] = ()
    runs: int = 1

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain dicts, lists and numbers."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{'the same as' if self.same else 'DIFFERENT from'} {self.oracle}"]
        lines.extend(f"  output {each}" for each in self.outputs)
        if self.first is not None:
            lines.append(f"first at node {self.node!r}, {self.operator} (opset {self.opset}), position {self.position}")
            lines.append(f"  {self.first}")
            if self.attributes:
                lines.append(f"  attributes {self.attributes}")
            lines.extend(f"  input {each}" for each in self.inputs)
        return "\n".join(lines)


def compare(
    model: Model | str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO | onnx.ModelProto,
    inputs: Mapping[str, Any],
    oracle: str = "onnxruntime",
    *,
    compiler: str = "xla",
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> Comparison:
    """Run a model here and elsewhere on the same inputs, and find the first node that makes a difference.

    For bug reports and tests. It blocks, compiles a few times, and wants a thread without an event loop.

    Args:
        model: A `Model`, or a local source as `Runtime.load` takes it.
        inputs: As for `Compiled.run`.
        oracle: "onnxruntime" (its plain kernels, without graph optimisations), "reference" (onnx's evaluator in Python) or
            "host" (our own numpy form).
        compiler: Our side: "xla" programs, or "eager" for our numpy form.
        rtol: Relative tolerance of floats; by dtype where None, float32 has 1e-3.
        atol: Absolute tolerance of floats; by dtype where None, float32 has 1e-4.
        seed: Of random operators, on our side and of "host". No two runtimes draw the same numbers.

    Returns:
        Each output with its largest difference, and the first node that makes one.

    Raises:
        MisuseError: This thread runs an event loop; an unknown oracle; onnxruntime is not installed; the source is on the
            Hub.
        InputError: The oracle refuses the model or the inputs.
        TransmuterError: As `run_sync`.
    """
    if oracle not in ORACLES:
        raise MisuseError(f"oracle={oracle!r} is none of {', '.join(map(repr, ORACLES))}")
    if not isinstance(model, Model):
        if isinstance(model, str) and is_repository(model):
            raise MisuseError(f"compare reads local files only; load {model!r} in a Runtime")
        model = read_local(model)
    there = {"onnxruntime": _onnxruntime, "reference": _reference, "host": _host(seed)}[oracle]
    search = _Search(model, dict(inputs), there, compiler, seed, rtol, atol)
    return search.compare(oracle)


class _Search:
    """Both sides of one comparison."""

    def __init__(
        self,
        model: Model,
        inputs: dict[str, Any],
        there: Callable[[Model, dict[str, Any], dict[str, Any]], list[Any]],
        compiler: str,
        seed: int,
        rtol: float | None,
        atol: float | None,
    ) -> None:
        self.model, self.inputs, self.there = model, inputs, there
        self.compiler, self.seed, self.rtol, self.atol = compiler, seed, rtol, atol
        self.runs = 0

    def differences(self, names: Sequence[str]) -> tuple[list[Difference], dict[str, Any]]:
        """How the values of these names differ, and our values."""
        self.runs += 1
        # Without their declared types: those may be wrong, and other runtimes then refuse what they would compute.
        cut = replace(self.model, graph=replace(self.model.graph, outputs=tuple(map(Value, names))))
        ours = run_sync(cut, self.inputs, seed=self.seed, compiler=self.compiler)
        theirs = self.there(cut, self.inputs, ours)
        pairs = zip(names, theirs, strict=True)
        return [difference(name, ours[name], value, self.rtol, self.atol) for name, value in pairs], ours

    def compare(self, oracle: str) -> Comparison:
        """Compare the outputs, and look for the first node where they differ."""
        outputs, _ = self.differences([value.name for value in self.model.outputs])
        if all(each.same for each in outputs):
            return Comparison(oracle, same=True, outputs=tuple(outputs), runs=self.runs)
        nodes = self.model.graph.nodes
        low, high = 0, len(nodes)  # before `low` nodes all agree, after `high` of them something does not
        found = [each for each in outputs if not each.same]
        while high - low > 1:
            middle = (low + high) // 2
            names = self.cut(middle)
            wrong = [each for each in self.differences(names)[0] if not each.same] if names else []
            low, high = (low, middle) if wrong else (middle, high)
            found = wrong or found
        node = nodes[high - 1]
        read = [name for name in node.inputs if name]
        given = [name for name in node.outputs if name]
        own = [each for each in found if each.name in given]
        _, values = self.differences(list(dict.fromkeys((*given, *self.computed(read)))))
        known = {**self.model.graph.initializers, **self.inputs, **values}
        return Comparison(
            oracle,
            same=False,
            outputs=tuple(outputs),
            first=(own or found)[0],
            node=node.name,
            operator=node.operator,
            position=node.position,
            opset=node.opset,
            attributes=_attributes(node),
            inputs=tuple(f"{name}: {_describe(known.get(name))}" for name in read),
            runs=self.runs,
        )

    def cut(self, count: int) -> list[str]:
        """What the first `count` nodes give and is still needed after them."""
        graph = self.model.graph
        made = {name for node in graph.nodes[:count] for name in node.outputs if name}
        needed = {value.name for value in graph.outputs}
        for node in graph.nodes[count:]:
            needed.update(node.inputs)
            for body in node.subgraphs():
                needed.update(body.outer_names())
        return [name for node in graph.nodes[:count] for name in node.outputs if name in needed and name in made]

    def computed(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that a node of the graph gives."""
        made = {name for node in self.model.graph.nodes for name in node.outputs}
        return [name for name in names if name in made]


# --- oracles ----------------------------------------------------------------------------------------------------------


def _host(seed: int) -> Callable[[Model, dict[str, Any], dict[str, Any]], list[Any]]:
    def run(model: Model, inputs: dict[str, Any], ours: dict[str, Any]) -> list[Any]:
        return list(run_sync(replace(model, optimize=False), inputs, seed=seed, compiler="eager").values())

    return run


def _reference(model: Model, inputs: dict[str, Any], ours: dict[str, Any]) -> list[Any]:
    try:
        return reference_outputs(model, [value.name for value in model.outputs], _declared_dtypes(model, inputs))
    except Exception as error:
        raise InputError(f"onnx's reference evaluator refuses the model: {type(error).__name__}: {error}") from error


def _onnxruntime(model: Model, inputs: dict[str, Any], ours: dict[str, Any]) -> list[Any]:
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError:
        raise MisuseError(
            'compare needs onnxruntime for this oracle: pip install onnxruntime, or give oracle="reference" or oracle="host"'
        ) from None
    names = [value.name for value in model.outputs]
    inputs = _declared_dtypes(model, inputs)
    # numpy has no such dtypes, and onnxruntime gives numpy arrays.
    constants = {name: value for name, value in inputs.items() if not _carried(value)}
    widened = [name for name in names if not _carried(ours[name])]
    with tempfile.TemporaryDirectory(prefix="transmuter-compare-") as folder:
        path = Path(folder) / "model.onnx"
        write_model(model, path, names, constants, widened)
        options = runtime.SessionOptions()
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        try:
            session = runtime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
            feeds = {each.name: inputs[each.name] for each in session.get_inputs() if each.name in inputs}
            return list(session.run(None, feeds))
        except Exception as error:
            raise InputError(f"onnxruntime refuses the model or its inputs: {error}") from error


def _carried(value: Any) -> bool:
    """Whether onnxruntime takes and gives the value through numpy."""
    if not isinstance(value, np.ndarray):
        return True
    return value.dtype.kind != "V" and int(value.dtype.isbuiltin) == 1


def _declared_dtypes(model: Model, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs as arrays of the dtypes that the graph declares: other runtimes do not widen."""
    types = {value.name: getattr(value.type, "dtype", None) for value in model.inputs}
    found: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, (list, tuple)) and name in types and types[name] is None:
            found[name] = value
            continue
        array = np.asarray(value)
        found[name] = array if types.get(name) is None else array.astype(types[name])
    return found


# --- values -----------------------------------------------------------------------------------------------------------


def difference(name: str, ours: Any, theirs: Any, rtol: float | None = None, atol: float | None = None) -> Difference:
    """How one value differs on both sides; `rtol` and `atol` of its dtype where None."""
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.generic):
        theirs = np.asarray(theirs)
    if isinstance(ours, list) and isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            return Difference(name, same=False, why=f"{len(ours)} tensors against {len(theirs)}")
        parts = [difference(f"{name}[{k}]", a, b, rtol, atol) for k, (a, b) in enumerate(zip(ours, theirs, strict=True))]
        return next((each for each in parts if not each.same), Difference(name, same=True, size=len(parts)))
    if not isinstance(ours, np.ndarray) or not isinstance(theirs, np.ndarray):
        same = repr(ours) == repr(theirs)
        return Difference(name, same=same, why="" if same else f"{ours!r} against {theirs!r}")
    texts = ours.dtype.kind in "OUST"
    narrow = not _carried(ours) and theirs.dtype == np.float32
    if ours.shape != theirs.shape or (ours.dtype != theirs.dtype and not texts and not narrow):
        return Difference(name, same=False, why=f"{ours.dtype}{ours.shape} against {theirs.dtype}{theirs.shape}")
    if texts:
        wrong = np.asarray(ours.astype(str) != theirs.astype(str))
        apart = wrong.astype(np.float64)
        return _told(name, ours, theirs, wrong, apart, "texts differ", None)
    if ours.dtype.kind in "iub":
        wrong = np.asarray(ours != theirs)
        apart = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
        return _told(name, ours, theirs, wrong, apart, "elements differ", float(apart.max(initial=0)))
    default = TOLERANCES.get(ours.dtype.name, TOLERANCES["float32"] if ours.dtype.kind == "c" else NARROW)
    rtol, atol = default[0] if rtol is None else rtol, default[1] if atol is None else atol
    kind = np.complex128 if ours.dtype.kind == "c" else np.float64
    a, b = ours.astype(kind), theirs.astype(kind)
    wrong = ~np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    with np.errstate(invalid="ignore"):
        both = np.isfinite(a) & np.isfinite(b)
        apart = np.where(both, np.abs(a - b), np.where(wrong, np.inf, 0.0))
        largest = float(np.where(both, apart, 0.0).max(initial=0.0))
    return _told(name, ours, theirs, wrong, apart, "elements differ", largest)


def _told(
    name: str, ours: np.ndarray, theirs: np.ndarray, wrong: np.ndarray, apart: np.ndarray, what: str, largest: float | None
) -> Difference:
    count, size = int(wrong.sum()), ours.size
    if not count:
        return Difference(name, same=True, size=size, largest=largest)
    place = np.unravel_index(int(np.argmax(np.where(wrong, apart, -1.0))), ours.shape)
    index = tuple(int(each) for each in place)
    why = f"{count} of {size} {what}" + ("" if largest is None else f", by up to {largest:.3g}")
    return Difference(name, False, why, count, size, largest, index, _plain(ours[index]), _plain(theirs[index]))


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value[()]
    if isinstance(value, np.generic):
        return value.item() if type(value).__module__ == "numpy" else float(value)
    return value


def _attributes(node: Node) -> str:
    shown = (f"{name}={value if isinstance(value, (int, float, str, tuple)) else '…'}" for name, value in node.attributes.items())
    return ", ".join(shown)


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        text = f"{value.dtype}{value.shape}"
        if value.size and value.dtype.kind not in "OUSTc":
            wide = value.astype(np.float64)
            return f"{text} from {wide.min():.6g} to {wide.max():.6g}"
        return text
    return f"sequence of {len(value)}" if isinstance(value, list) else type(value).__name__
