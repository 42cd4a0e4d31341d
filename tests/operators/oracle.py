"""One node in onnxruntime, and the same node through our definition in both of its forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from transmuter_async.errors import NeedsValue, OperatorError
from transmuter_async.graph import Node
from transmuter_async.graph.dtypes import element_type_of
from transmuter_async.operators import invoke, resolve
from transmuter_async.operators.lowering import LOWERINGS
from transmuter_async.operators.recipes import RECIPES

onnxruntime.set_default_logger_severity(4)
MICROSOFT = "com.microsoft"
ML = "ai.onnx.ml"
OPSETS = {"": 21, ML: 5, MICROSOFT: 1}


def onnxruntime_outputs(
    op: str,
    inputs: Sequence[Any],
    attributes: dict[str, Any],
    *,
    domain: str = MICROSOFT,
    opset: int | None = None,
    outputs: int = 1,
    constant: Sequence[int] = (),
    types: dict[int, Any] | None = None,
) -> list[Any]:
    """What onnxruntime's CPU kernel answers.

    Inputs at `constant` are given as initializers. `types`: dtypes of outputs that onnxruntime can't infer.
    """
    model, feeds = one_node(
        op, inputs, attributes, domain=domain, opset=opset, outputs=outputs, constant=constant, types=types
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def one_node(
    op: str,
    inputs: Sequence[Any],
    attributes: dict[str, Any],
    *,
    domain: str = MICROSOFT,
    opset: int | None = None,
    outputs: int = 1,
    constant: Sequence[int] = (),
    types: dict[int, Any] | None = None,
) -> tuple[bytes, dict[str, Any]]:
    """The file of a model of one node, and what to feed it."""
    versions = OPSETS | ({} if opset is None else {domain: opset})
    names = [f"i{k}" if value is not None else "" for k, value in enumerate(inputs)]
    feeds, values, initializers = {}, [], []
    for k, (name, value) in enumerate(zip(names, inputs, strict=True)):
        if value is None:
            continue
        if k in constant:
            initializers.append(numpy_helper.from_array(value, name))
        else:
            feeds[name] = value
            values.append(helper.make_tensor_value_info(name, element_type_of(value.dtype), value.shape))
    results = [f"o{k}" for k in range(outputs)]
    given = {
        key: numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value
        for key, value in attributes.items()
        if value is not None
    }
    node = helper.make_node(op, names, results, domain=domain, **given)
    graph = helper.make_graph(
        [node],
        "one",
        values,
        [
            helper.make_tensor_value_info(name, element_type_of(np.dtype(types[k])), None)
            if types and k in types
            else onnx.ValueInfoProto(name=name)
            for k, name in enumerate(results)
        ],
        initializer=initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(d, v) for d, v in versions.items()])
    model.ir_version = 10
    return model.SerializeToString(), feeds


class Bench:
    """A `Context` for one node on its own, in place of the compiler's."""

    def __init__(self, op: str, domain: str, opset: int, count: int, outputs: int) -> None:
        self.node = Node(
            op_type=op,
            domain=domain,
            inputs=tuple(f"i{k}" for k in range(count)),
            outputs=tuple(f"o{k}" for k in range(outputs)),
            attributes={},
            name="one",
            path=(0,),
            opset=opset,
        )
        self.opset = opset
        self.platform = "cpu"
        self.lowerings = frozenset(LOWERINGS)

    def lowers(self, name: str) -> bool:
        return name in self.lowerings

    def prepared(self, weight: Any, recipe: str, *arguments: float) -> Any:
        return RECIPES[recipe](*(weight if isinstance(weight, tuple) else (weight,)), *arguments)

    def bounded(
        self, indices: Any, size: Any, *, input: str, axis: int | None, inclusive: bool = False
    ) -> tuple[Any, Any]:
        np_ = jax.numpy if isinstance(indices, jax.Array) else np
        indices = np_.where(indices < 0, indices + size, indices)
        limit = size if inclusive else size - 1
        if np_ is np and ((indices < 0) | (indices > limit)).any():
            raise self.error(f"{input} is out of range")
        # As the compiler's: int64 on the host, int32 in a program.
        dtype = np.int64 if np_ is np else np.int32
        return np_.clip(indices, 0, np_.maximum(limit, 0)).astype(dtype), None

    def fill_invalid(self, result: Any, valid: Any) -> Any:
        assert valid is None
        return result

    def random_key(self, seed: Any = None) -> Any:
        if isinstance(seed, jax.Array):
            return jax.numpy.stack([np.uint32(0), seed.astype(np.uint32)])
        return np.asarray([0, 0 if seed is None else int(seed)], np.uint32)

    def carry(self, body: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
        return lambda *args: (body(*args), np.int32(0))

    def absorb(self, alarm: Any) -> None:
        pass

    def refuse(self, bad: Any, message: str) -> None:
        if not isinstance(bad, jax.Array) and np.any(bad):
            raise self.error(message)

    def error(self, message: str) -> Exception:
        return OperatorError(message, node="one", operator=self.node.operator)

    def needs(self, value: Any, index: int, reason: str) -> np.ndarray:
        if isinstance(value, jax.Array):
            raise NeedsValue(
                node="one",
                operator=self.node.operator,
                position=0,
                value=f"i{index}",
                producer=None,
                reason=reason,
                hint="",
            )
        return np.asarray(value)

    def budget(self, shape: Sequence[int], dtype: Any) -> tuple[int, ...]:
        return tuple(int(d) for d in shape)


def host_outputs(
    op: str,
    inputs: Sequence[Any],
    attributes: dict[str, Any],
    *,
    domain: str = MICROSOFT,
    opset: int | None = None,
    outputs: int = 1,
) -> tuple[Any, ...]:
    """Our outputs, computed in numpy."""
    version = OPSETS[domain] if opset is None else opset
    definition = resolve(domain, op, version)
    assert definition is not None, f"{domain}:{op}-{version} has no definition"
    runner = {"context": Bench(op, domain, version, len(inputs), outputs), "n_outputs": outputs}
    attributes = {k: tuple(v) if isinstance(v, list) else v for k, v in attributes.items() if v is not None}
    return invoke(definition, inputs, attributes, runner)


def traced_outputs(
    op: str,
    inputs: Sequence[Any],
    attributes: dict[str, Any],
    *,
    domain: str = MICROSOFT,
    opset: int | None = None,
    outputs: int = 1,
    static: Sequence[int] = (),
) -> tuple[Any, ...]:
    """Our outputs, computed by one XLA program. Static inputs, and those at `static`, are host values."""
    version = OPSETS[domain] if opset is None else opset
    definition = resolve(domain, op, version)
    assert definition is not None, f"{domain}:{op}-{version} has no definition"
    held = {
        k
        for k, value in enumerate(inputs)
        if value is None
        or k in static
        or not isinstance(value, np.ndarray)
        or value.dtype == object
        or definition.input_name(k) in definition.static
    }

    def call(*traced: Any) -> tuple[Any, ...]:
        rest = iter(traced)
        given = [value if k in held else next(rest) for k, value in enumerate(inputs)]
        with jax.disable_jit(not definition.loops):  # as a program is traced
            return host_outputs(op, given, attributes, domain=domain, opset=opset, outputs=outputs)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        results = jax.jit(call)(*(value for k, value in enumerate(inputs) if k not in held))
        return tuple(None if r is None else np.asarray(r) for r in results)


def agree(ours: Any, theirs: Any, *, rtol: float = 0.0, atol: float = 0.0, what: str = "") -> None:
    """Fail unless both are the same value: dtype, shape, elements within the tolerance (NaN equals NaN)."""
    if isinstance(theirs, list):
        assert isinstance(ours, list) and len(ours) == len(theirs), f"{what}: {ours} is not {theirs}"
        for one, other in zip(ours, theirs, strict=True):
            agree(one, other, rtol=rtol, atol=atol, what=what)
        return
    if isinstance(theirs, dict):
        assert isinstance(ours, dict) and list(ours) == list(theirs), f"{what}: {ours} is not {theirs}"
        for key in theirs:
            np.testing.assert_allclose(ours[key], theirs[key], rtol=rtol, atol=atol, err_msg=what)
        return
    theirs = np.asarray(theirs)
    assert isinstance(ours, np.ndarray), f"{what}: {type(ours)}"
    assert ours.dtype == theirs.dtype, f"{what}: dtype {ours.dtype} is not {theirs.dtype}"
    assert ours.shape == theirs.shape, f"{what}: shape {ours.shape} is not {theirs.shape}"
    if theirs.dtype.kind in "fV":
        one, other = ours.astype(np.float64), theirs.astype(np.float64)
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=what)
    elif theirs.dtype.kind in "iu" and atol:
        difference = np.abs(ours.astype(np.int64) - theirs.astype(np.int64))
        assert difference.max(initial=0) <= atol, f"{what}: off by {difference.max()}"
    else:
        np.testing.assert_array_equal(ours, theirs, err_msg=what)


def compare(
    op: str,
    inputs: Sequence[Any],
    attributes: dict[str, Any] | None = None,
    *,
    domain: str = MICROSOFT,
    opset: int | None = None,
    outputs: int = 1,
    constant: Sequence[int] = (),
    static: Sequence[int] = (),
    traced: bool = True,
    skip: Sequence[int] = (),
    rtol: float = 0.0,
    atol: float = 0.0,
    expected: Sequence[Any] | None = None,
    types: dict[int, Any] | None = None,
) -> tuple[Any, ...]:
    """Both of our forms against onnxruntime, or against `expected`; outputs at `skip` are not looked at."""
    attributes = attributes or {}
    if expected is None:
        expected = onnxruntime_outputs(
            op, inputs, attributes, domain=domain, opset=opset, outputs=outputs, constant=constant, types=types
        )
    ways: list[tuple[str, Callable[[], tuple[Any, ...]]]] = [
        ("host", lambda: host_outputs(op, inputs, attributes, domain=domain, opset=opset, outputs=outputs))
    ]
    if traced:
        ways.append(
            (
                "traced",
                lambda: traced_outputs(
                    op, inputs, attributes, domain=domain, opset=opset, outputs=outputs, static=static
                ),
            )
        )
    for way, run in ways:
        results = run()
        assert len(results) >= len(expected), f"{op} {way}: {len(results)} outputs for {len(expected)}"
        for k, (one, other) in enumerate(zip(results, expected, strict=False)):
            if k not in skip:
                agree(one, other, rtol=rtol, atol=atol, what=f"{op} output {k}, {way}")
    return results
