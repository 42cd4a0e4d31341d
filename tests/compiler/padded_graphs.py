"""Graphs that grow by steps, each an operator that padding has a way to get wrong; for `test_axes_adversary`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .support import graph, node

TALL, FLAT, TRUTH, WHOLE, SQUARE, POOLED, LINE = "tall", "flat", "truth", "whole", "square", "pooled", "line"
"""(b, s, 4) floats; (b, 4, s) floats; (b, s) booleans, (b, s) integers, (b, s, s) floats, (b, 4) floats, (b, s) floats."""

SHAPES = {
    TALL: ["b", "s", 4], FLAT: ["b", 4, "s"], TRUTH: ["b", "s"], WHOLE: ["b", "s"], SQUARE: ["b", "s", "s"], POOLED: ["b", 4],
    LINE: ["b", "s"],
}  # fmt: skip
TYPES = {TRUTH: TensorProto.BOOL, WHOLE: TensorProto.INT64}


class Maker:
    """A graph that grows by steps."""

    def __init__(self) -> None:
        random = np.random.default_rng(7)
        self.nodes: list[onnx.NodeProto] = []
        self.held: dict[str, np.ndarray] = {
            "w": random.uniform(-1, 1, (4, 4)),
            "k3": random.uniform(-1, 1, (4, 4, 3)),
            "k4": random.uniform(-1, 1, (4, 4, 4)),
            "bias": random.uniform(0.5, 1, 4),
            "table": random.uniform(-1, 1, (6, 4)),
        }
        self.pool: dict[str, list[str]] = {kind: [] for kind in SHAPES}
        self.pool[TALL].append("x")
        self.pool[WHOLE].extend(["ids", "mask"])
        self.add(TRUTH, "Cast", ["mask"], to=9)
        self.add(LINE, "Cast", ["mask"], to=TensorProto.DOUBLE)

    def const(self, value: Any, dtype: Any = np.float64) -> str:
        array = np.asarray(value, dtype)
        name = f"c_{array.dtype}_{array.tolist()}".replace(" ", "")
        self.held[name] = array
        return name

    def op(self, op_type: str, inputs: list[str], *, outputs: int = 1, at: int = 0, **attributes: Any) -> str:
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(node(op_type, inputs, names, **attributes))
        return names[at]

    def add(self, kind: str, op_type: str, inputs: list[str], **attributes: Any) -> str:
        return self.keep(kind, self.op(op_type, inputs, **attributes))

    def keep(self, kind: str, name: str) -> str:
        self.pool[kind].append(name)
        return name

    def pick(self, kind: str, at: int) -> str:
        held = self.pool[kind]
        return held[-1 - at % len(held)] if held else {TALL: "x"}[kind]

    def axes(self, *values: int) -> str:
        return self.const(list(values), np.int64)

    def proto(self, outputs: list[tuple[str, str]]) -> onnx.ModelProto:
        used = {name for each in self.nodes for name in each.input}
        for each in self.nodes:
            for attribute in each.attribute:
                used |= {n for inner in attribute.g.node for n in inner.input}
        inputs = [
            helper.make_tensor_value_info("x", TensorProto.DOUBLE, ["b", "s", 4]),
            helper.make_tensor_value_info("mask", TensorProto.INT64, ["b", "s"]),
            helper.make_tensor_value_info("ids", TensorProto.INT64, ["b", "s"]),
            helper.make_tensor_value_info("lengths", TensorProto.INT64, ["b"]),
        ]
        given = [
            helper.make_tensor_value_info(name, TYPES.get(kind, TensorProto.DOUBLE), SHAPES[kind])
            for name, kind in outputs
        ]
        held = [numpy_helper.from_array(array, name) for name, array in self.held.items() if name in used]
        made = helper.make_graph(self.nodes, "g", inputs, given, held)
        return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


Step = Callable[[Maker, int, int], Any]
STEPS: dict[str, Step] = {}


def step(name: str) -> Callable[[Step], Step]:
    def register(function: Step) -> Step:
        STEPS[name] = function
        return function

    return register


def _unary(op: str) -> Step:
    def apply(m: Maker, i: int, j: int) -> None:
        m.add(TALL, op, [m.pick(TALL, i)])

    return apply


for _op in ["Relu", "Tanh", "Sigmoid", "Neg", "Abs", "Sqrt", "Log", "Reciprocal", "Softplus", "Erf"]:
    STEPS[_op] = _unary(_op)


def _binary(op: str) -> Step:
    def apply(m: Maker, i: int, j: int) -> None:
        m.add(TALL, op, [m.pick(TALL, i), m.pick(TALL, j)])

    return apply


for _op in ["Add", "Sub", "Mul", "Div", "Max", "Min", "Pow"]:
    STEPS[_op] = _binary(_op)

NUMBERS = [0.0, 1.0, -1.0, 2.0, 1e-6, -10000.0, 0.5, -0.5]


def _scalar(op: str, flipped: bool) -> Step:
    def apply(m: Maker, i: int, j: int) -> None:
        operands = [m.pick(TALL, i), m.const(NUMBERS[j % len(NUMBERS)])]
        m.add(TALL, op, operands[::-1] if flipped else operands)

    return apply


for _op in ["Add", "Sub", "Mul", "Div", "Max", "Min", "Pow"]:
    STEPS[f"{_op} number"] = _scalar(_op, False)
for _op in ["Sub", "Div", "Pow"]:
    STEPS[f"number {_op}"] = _scalar(_op, True)


@step("dense")
def _(m: Maker, i: int, j: int) -> None:
    made = m.op("MatMul", [m.pick(TALL, i), "w"])
    m.add(TALL, "Add", [made, "bias"]) if j % 2 else m.keep(TALL, made)


@step("layer norm")
def _(m: Maker, i: int, j: int) -> None:
    a = m.pick(TALL, i)
    mean = m.op("ReduceMean", [a, m.axes(2)])
    off = m.op("Sub", [a, mean])
    var = m.op("ReduceMean", [m.op("Mul", [off, off]), m.axes(2)])
    safe = m.op("Add", [var, m.const(1e-5 if j % 4 else 0.0)])
    root = m.op("Sqrt", [safe])
    m.add(TALL, "Div", [off, root]) if j % 2 else m.add(TALL, "Mul", [off, m.op("Reciprocal", [root])])


@step("lp norm")
def _(m: Maker, i: int, j: int) -> None:
    m.add(TALL, "LpNormalization", [m.pick(TALL, i)], axis=[2, 1][j % 2], p=1 + j // 2 % 2)


@step("masked")
def _(m: Maker, i: int, j: int) -> None:
    m.add(TALL, "Mul", [m.pick(TALL, i), m.op("Unsqueeze", [m.pick(LINE, j), m.axes(2)])])


@step("selected")
def _(m: Maker, i: int, j: int) -> None:
    truth = m.op("Unsqueeze", [m.pick(TRUTH, j), m.axes(2)])
    number = m.const([0.0, 1.0, -1.0, -1e4, -np.inf][j % 5])
    a = m.pick(TALL, i)
    m.add(TALL, "Where", [truth, a, number] if j % 3 else [truth, number, a])


def _statistic(op: str) -> Step:
    def apply(m: Maker, i: int, j: int) -> None:
        a = m.pick(TALL, i)
        axis = [1, 2, 0][j % 3]
        found = m.op(op, [a, m.axes(axis)])
        m.add(TALL, ["Sub", "Div", "Mul"][j // 3 % 3], [a, found])
        if axis == 1:
            m.add(POOLED, "Squeeze", [found, m.axes(1)])

    return apply


for _op in ["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare"]:
    STEPS[f"Reduce{_op}"] = _statistic(f"Reduce{_op}")


@step("softmax")
def _(m: Maker, i: int, j: int) -> None:
    m.add(TALL, ["Softmax", "LogSoftmax", "Hardmax"][j // 3 % 3], [m.pick(TALL, i)], axis=[2, 1, 0][j % 3])


@step("mean pool")
def _(m: Maker, i: int, j: int) -> None:
    weight = m.op("Unsqueeze", [m.pick(LINE, j), m.axes(2)])
    total = m.op("ReduceSum", [m.op("Mul", [m.pick(TALL, i), weight]), m.axes(1)], keepdims=0)
    count = m.op("ReduceSum", [weight, m.axes(1)], keepdims=0)
    m.add(POOLED, "Div", [total, m.op("Max", [count, m.const(1.0)]) if j % 2 else count])


@step("back from pool")
def _(m: Maker, i: int, j: int) -> None:
    if m.pool[POOLED]:
        wide = m.op("Unsqueeze", [m.pick(POOLED, i), m.axes(1)])
        m.add(TALL, ["Add", "Div", "Mul"][j % 3], [m.pick(TALL, j), wide])


@step("scores")
def _(m: Maker, i: int, j: int) -> None:
    a = m.op("Tanh", [m.pick(TALL, i)])
    m.add(SQUARE, "MatMul", [a, m.op("Transpose", [m.pick(TALL, j)], perm=[0, 2, 1])])


def _hole(m: Maker, j: int) -> str:
    return m.op("Unsqueeze", [m.op("Sub", [m.const(1.0), m.pick(LINE, j)]), m.axes(1)])


def _later(m: Maker) -> str:
    n = m.op("Shape", ["x"], start=1, end=2)
    full = m.op("Expand", [m.const(1.0), m.op("Concat", [n, n], axis=0)])
    return m.op("Trilu", [full, m.const(1, np.int64)], upper=1)


LOW = [-1e4, -1e9, -1000.0, -50.0]


@step("score mask")
def _(m: Maker, i: int, j: int) -> None:
    if m.pool[SQUARE]:
        m.add(SQUARE, "Add", [m.pick(SQUARE, i), m.op("Mul", [_hole(m, j), m.const(LOW[j % 4])])])


@step("score mask with causal")
def _(m: Maker, i: int, j: int) -> None:
    if m.pool[SQUARE]:
        off = m.op(["Max", "Add", "Mul", "Min"][j % 4], [_hole(m, j), _later(m)])
        m.add(SQUARE, "Add", [m.pick(SQUARE, i), m.op("Mul", [off, m.const(LOW[j // 4 % 4])])])


@step("score selected")
def _(m: Maker, i: int, j: int) -> None:
    if m.pool[SQUARE]:
        truth = m.op("Unsqueeze", [m.pick(TRUTH, j), m.axes(1 if j % 4 else 2)])
        m.add(SQUARE, "Where", [truth, m.pick(SQUARE, i), m.const([-np.inf, -1e4, 0.0][j % 3])])


@step("attend")
def _(m: Maker, i: int, j: int) -> None:
    if m.pool[SQUARE]:
        weights = m.add(SQUARE, "Softmax", [m.pick(SQUARE, i)], axis=-1)
        m.add(TALL, "MatMul", [weights, m.pick(TALL, j)])


@step("attend written out")
def _(m: Maker, i: int, j: int) -> None:
    if m.pool[SQUARE]:
        a = m.pick(SQUARE, i)
        e = m.op("Exp", [m.op("Sub", [a, m.op("ReduceMax", [a, m.axes(2)])])])
        weights = m.add(SQUARE, "Div", [e, m.op("ReduceSum", [e, m.axes(2)])])
        m.add(TALL, "MatMul", [weights, m.pick(TALL, j)])


@step("attention")
def _(m: Maker, i: int, j: int) -> None:
    """All of it at once, with each way to mask."""
    a = m.op("Tanh", [m.pick(TALL, i)])
    scores = m.op("MatMul", [a, m.op("Transpose", [a], perm=[0, 2, 1])])
    low, hole = m.const(LOW[j % 2]), _hole(m, j // 2)
    form = j // 2 % 6
    if form < 4:
        later = m.op("Mul", [_later(m), m.const(2.0)]) if j % 5 == 4 else _later(m)
        off = hole if form == 0 else m.op(["Max", "Add", "Min"][form - 1], [hole, later])
        scores = m.op("Add", [scores, m.op("Mul", [off, low])])
    else:
        truth = m.op("Unsqueeze", [m.pick(TRUTH, j // 12), m.axes(1)])
        if form == 5:
            truth = m.op("And", [truth, m.op("Not", [m.op("Cast", [_later(m)], to=9)])])
        scores = m.op("Where", [truth, scores, low if j % 3 else m.const(-np.inf)])
    weights = m.op("Softmax", [scores], axis=-1)
    m.add(TALL, "MatMul", [weights, m.pick(TALL, j // 12)])


@step("mix without softmax")
def _(m: Maker, i: int, j: int) -> None:
    if m.pool[SQUARE]:
        m.add(TALL, "MatMul", [m.pick(SQUARE, i), m.pick(TALL, j)])


@step("nan to number")
def _(m: Maker, i: int, j: int) -> None:
    a = m.pick(SQUARE if m.pool[SQUARE] and j % 2 else TALL, i)
    m.add(SQUARE if a in m.pool[SQUARE] else TALL, "Where", [m.op("IsNaN", [a]), m.const(0.0), a])


@step("flat")
def _(m: Maker, i: int, j: int) -> None:
    m.add(FLAT, "Transpose", [m.pick(TALL, i)], perm=[0, 2, 1])


@step("tall again")
def _(m: Maker, i: int, j: int) -> None:
    if m.pool[FLAT]:
        m.add(TALL, "Transpose", [m.pick(FLAT, i)], perm=[0, 2, 1])


@step("conv")
def _(m: Maker, i: int, j: int) -> None:
    source = m.pick(FLAT, i) if m.pool[FLAT] else m.add(FLAT, "Transpose", ["x"], perm=[0, 2, 1])
    forms = [
        {"pads": [1, 1]}, {"pads": [2, 0]}, {"pads": [0, 2]}, {"dilations": [2], "pads": [2, 2]}, {"auto_pad": "SAME_UPPER"},
        {"auto_pad": "SAME_LOWER"}, {"dilations": [3], "pads": [3, 3]},
    ]  # fmt: skip
    m.add(FLAT, "Conv", [source, "k3", "bias"] if j % 2 else [source, "k3"], **forms[j // 2 % len(forms)])


@step("conv turned")
def _(m: Maker, i: int, j: int) -> None:
    source = m.pick(FLAT, i) if m.pool[FLAT] else m.add(FLAT, "Transpose", ["x"], perm=[0, 2, 1])
    up = m.op("ConvTranspose", [source, "k4", "bias"], strides=[2], pads=[1, 1])
    if j % 3 == 0:
        up = m.op("Conv", [up, "k3", "bias"], pads=[1, 1])
    if j % 2:
        m.add(FLAT, "Conv", [up, "k4"], strides=[2], pads=[1, 1])
    else:
        m.add(FLAT, ["AveragePool", "MaxPool"][j // 2 % 2], [up], kernel_shape=[2], strides=[2])


@step("pool")
def _(m: Maker, i: int, j: int) -> None:
    source = m.pick(FLAT, i) if m.pool[FLAT] else m.add(FLAT, "Transpose", ["x"], perm=[0, 2, 1])
    forms: list[tuple[str, dict[str, Any]]] = [
        ("MaxPool", {"pads": [1, 1]}), ("AveragePool", {"pads": [1, 1]}), ("AveragePool", {"pads": [1, 1], "count_include_pad": 1}),
        ("AveragePool", {"pads": [2, 0]}), ("MaxPool", {"pads": [2, 0]}), ("LpPool", {"pads": [1, 1], "p": 2}),
    ]  # fmt: skip
    op, more = forms[j % len(forms)]
    m.add(FLAT, op, [source], kernel_shape=[3], **more)


@step("running sum")
def _(m: Maker, i: int, j: int) -> None:
    m.add(
        TALL, "CumSum", [m.pick(TALL, i), m.const([1, 2, 0][j % 3], np.int64)], exclusive=j // 3 % 2, reverse=j // 6 % 2
    )


@step("first")
def _(m: Maker, i: int, j: int) -> None:
    a = m.pick(TALL, i)
    if j % 3 == 2:
        m.add(POOLED, "Gather", [a, m.const(-1, np.int64)], axis=1)
    elif j % 3:
        m.add(POOLED, "Gather", [a, m.const(0, np.int64)], axis=1)
    else:
        m.add(POOLED, "Squeeze", [m.op("Slice", [a, m.axes(0), m.axes(1), m.axes(1)]), m.axes(1)])


@step("reversed")
def _(m: Maker, i: int, j: int) -> None:
    m.add(TALL, "Slice", [m.pick(TALL, i), m.axes(-1), m.axes(-(2**63) + 1), m.axes(1 + j % 2), m.axes(-1)])


@step("rows of all")
def _(m: Maker, i: int, j: int) -> None:
    flat = m.op("Reshape", [m.pick(TALL, i), m.axes(-1, 4)])
    work = m.op(["Tanh", "Softmax", "LpNormalization"][j % 3], [flat])
    m.add(TALL, "Reshape", [work, m.op("Shape", ["x"])])


@step("recurrence")
def _(m: Maker, i: int, j: int) -> None:
    m.held |= {"gw": np.full((1, 12, 4), 0.3), "gr": np.full((1, 12, 4), -0.2)}
    turned = m.op("Transpose", [m.pick(TALL, i)], perm=[1, 0, 2])
    direction = ["forward", "reverse"][j % 2]
    steps = m.op("GRU", [turned, "gw", "gr"], outputs=2, at=0, hidden_size=4, direction=direction)
    last = steps.rsplit("_", 1)[0] + "_1"
    if j // 2 % 2:
        m.add(POOLED, "Squeeze", [last, m.axes(0)])
    m.add(TALL, "Transpose", [m.op("Squeeze", [steps, m.axes(1)])], perm=[1, 0, 2])


@step("scan")
def _(m: Maker, i: int, j: int) -> None:
    work = ["Tanh", "Sqrt", "Log"][j % 3]
    body = graph(
        [node("Add", ["st", "sl"], ["su"]), node(work, ["su"], ["o"]), node("Tanh", ["su"], ["nx"])],
        ["st:double[b,4]", "sl:double[b,4]"], ["nx:double[b,4]", "o:double[b,4]"],
    )  # fmt: skip
    start = m.op("Gather", [m.pick(TALL, i), m.const(0, np.int64)], axis=1)
    found = m.op(
        "Scan", [start, m.pick(TALL, j)], outputs=2, at=1, body=body, num_scan_inputs=1, scan_input_axes=[1], scan_output_axes=[1],
        scan_input_directions=[j // 3 % 2],
    )  # fmt: skip
    m.keep(TALL, found)
    if j // 6 % 2:
        m.keep(POOLED, found.rsplit("_", 1)[0] + "_0")


@step("loop")
def _(m: Maker, i: int, j: int) -> None:
    inner = [
        [node("Tanh", ["c"], ["d"])],
        [node("Add", ["c", m.const(1.0)], ["d"])],
        [node("ReduceMean", ["c", m.axes(1)], ["t"]), node("Sub", ["c", "t"], ["d"])],
    ][j % 3]
    body = graph(
        [node("Identity", ["on"], ["go"]), *inner],
        ["it:int64[]", "on:bool[]", "c:double[b,s,4]"],
        ["go:bool[]", "d:double[b,s,4]"],
    )
    m.add(TALL, "Loop", [m.const(1 + j % 2, np.int64), "", m.pick(TALL, i)], body=body)


@step("integer")
def _(m: Maker, i: int, j: int) -> None:
    a, b = m.pick(WHOLE, i), m.pick(WHOLE, j)
    op = ["Add", "Sub", "Mul", "Max", "Min", "Div", "Mod"][j % 7]
    if op in ("Div", "Mod"):
        b = m.op("Max", [b, m.const(1, np.int64)]) if j // 7 % 2 else b
    m.add(WHOLE, op, [a, b])


@step("integer number")
def _(m: Maker, i: int, j: int) -> None:
    a, b = m.pick(WHOLE, i), m.const([1, 2, 5, -1][j % 4], np.int64)
    op = ["Add", "Sub", "Mul", "Max", "Min", "Div", "Mod"][j // 4 % 7]
    m.add(WHOLE, op, [b, a] if j // 28 % 2 else [a, b])


@step("position")
def _(m: Maker, i: int, j: int) -> None:
    if j % 2:
        m.add(WHOLE, "CumSum", [m.pick(WHOLE, i), m.const(1, np.int64)])
    else:
        n = m.op("Squeeze", [m.op("Shape", ["x"], start=1, end=2)])
        places = m.op("Range", [m.const(0, np.int64), n, m.const(1, np.int64)])
        m.add(WHOLE, "Mul", [m.op("Unsqueeze", [places, m.axes(0)]), m.pick(WHOLE, i)])


@step("within lengths")
def _(m: Maker, i: int, j: int) -> None:
    n = m.op("Squeeze", [m.op("Shape", ["x"], start=1, end=2)])
    places = m.op("Unsqueeze", [m.op("Range", [m.const(0, np.int64), n, m.const(1, np.int64)]), m.axes(0)])
    lengths = m.op("Unsqueeze", ["lengths", m.axes(1)])
    op = ["Less", "LessOrEqual", "Greater", "Equal"][j % 4]
    truth = m.add(TRUTH, op, [lengths, places] if op == "Greater" else [places, lengths])
    m.add(LINE, "Cast", [truth], to=TensorProto.DOUBLE)


@step("look up")
def _(m: Maker, i: int, j: int) -> None:
    index = m.pick(WHOLE, i)
    if j % 3 == 0:
        index = m.op("Clip", [index, m.const(0, np.int64), m.const(5, np.int64)])
    elif j % 3 == 1:
        index = m.op("ArgMax", [m.pick(TALL, i)], axis=2, keepdims=0)
    m.add(TALL, "Gather", ["table", index])


@step("extreme")
def _(m: Maker, i: int, j: int) -> None:
    a, axis = m.pick(TALL, i), [1, 2][j % 2]
    if j // 2 % 2:
        found = m.op("TopK", [a, m.axes(1)], outputs=2, axis=axis, at=0)
        m.add(TALL, "Sub", [a, found])
    elif axis == 1:
        found = m.op("ArgMax", [a], axis=1, keepdims=0, select_last_index=j // 4 % 2)
        m.add(POOLED, "Cast", [found], to=TensorProto.DOUBLE)


@step("compared")
def _(m: Maker, i: int, j: int) -> None:
    if j % 2:
        truth = m.add(TRUTH, ["Greater", "Equal"][j // 2 % 2], [m.pick(WHOLE, i), m.const(j % 3, np.int64)])
    else:
        truth = m.add(TRUTH, ["And", "Or", "Xor"][j // 2 % 3], [m.pick(TRUTH, i), m.pick(TRUTH, j)])
        truth = m.add(TRUTH, "Not", [truth]) if j % 4 else truth
    m.add(LINE, "Cast", [truth], to=TensorProto.DOUBLE)


@step("size as a number")
def _(m: Maker, i: int, j: int) -> None:
    n = m.op("Cast", [m.op("Shape", ["x"], start=1, end=2)], to=TensorProto.DOUBLE)
    m.add(TALL, ["Div", "Add"][j % 2], [m.pick(TALL, i), n])


@step("drawn")
def _(m: Maker, i: int, j: int) -> None:
    m.add(TALL, "Add", [m.pick(TALL, i), m.op("RandomUniformLike", [m.pick(TALL, j)], seed=1.0)])


@step("quantised")
def _(m: Maker, i: int, j: int) -> None:
    q = m.op("QuantizeLinear", [m.op("Cast", [m.pick(TALL, i)], to=1), m.const(0.1, np.float32), m.const(3, np.uint8)])
    m.add(
        TALL,
        "Cast",
        [m.op("DequantizeLinear", [q, m.const(0.1, np.float32), m.const(3, np.uint8)])],
        to=TensorProto.DOUBLE,
    )
