"""Random graphs of everything that makes a graph dynamic, with inputs of several sizes for them.

Every graph takes rows `x: float[n,3]`, `ids: int64[n]` and `mode: int64[]`. A value belongs to a *kind* and a *group*:
values of one group have the same number of rows in every call. What decides anything (masks, counts, conditions) is
computed from whole numbers below 2^24, which every runtime computes without rounding, so that the decisions of two
runtimes never differ; what rounds (`Sin`, `Softmax`, …) is a kind of its own that only flows to outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

OPSET = 18
TOP = 50.0
"""Rows hold whole numbers from -TOP to TOP."""

ROWS, ROUNDED, INTS, MASK, COUNT, SEQUENCE = "rows", "rounded", "ints", "mask", "count", "sequence"
TYPES = {
    ROWS: (TensorProto.FLOAT, (None, 3)),
    ROUNDED: (TensorProto.FLOAT, (None, 3)),
    INTS: (TensorProto.INT64, (None,)),
    MASK: (TensorProto.BOOL, (None,)),
    COUNT: (TensorProto.INT64, ()),
}
"""Of each kind the element type and shape: float[g,3], int64[g] of 0 to 6, bool[g], int64[] of 0 to 40, and sequences of rows."""


@dataclass(frozen=True)
class Named:
    """A value of the graph that is being made."""

    name: str
    kind: str
    group: str


def typed(value: Named, name: str | None = None) -> onnx.ValueInfoProto:
    """Its declaration; the number of rows has no name, a sequence is one of rows."""
    if value.kind == SEQUENCE:
        return helper.make_tensor_sequence_value_info(name or value.name, TensorProto.FLOAT, (None, 3))
    element, shape = TYPES[value.kind]
    return helper.make_tensor_value_info(name or value.name, element, shape)


@dataclass
class Names:
    """Fresh names, and the weights of the whole graph."""

    count: int = 0
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def fresh(self, word: str) -> str:
        self.count += 1
        return f"{word}{self.count}"

    def weight(self, array: Any) -> str:
        array = np.asarray(array)
        for name, known in self.weights.items():
            if known.dtype == array.dtype and known.shape == array.shape and known.tobytes() == array.tobytes():
                return name
        name = f"w{len(self.weights)}"
        self.weights[name] = array
        return name


class Maker:
    """Makes the nodes of a graph, or of a body inside one."""

    def __init__(self, draw: Callable[[Any], Any], names: Names, outer: Sequence[Named] = (), depth: int = 0) -> None:
        self.draw = draw
        self.names = names
        self.pool: list[Named] = list(outer)
        self.nodes: list[onnx.NodeProto] = []
        self.depth = depth
        self.declared: list[onnx.ValueInfoProto] = []

    # --- small words ---

    def whole(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def pick(self, kind: str, group: str | None = None) -> Named:
        """A value of a kind, and of a group if one is asked for; made where there is none."""
        found = [each for each in self.pool if each.kind == kind and group in (None, each.group)]
        if found:
            return found[-1 - self.whole(0, min(len(found), 6) - 1)]
        if kind == ROWS:
            assert group is not None
            return self.rows_of(group)
        return {INTS: self.to_ints, MASK: self.to_mask, COUNT: self.to_count, SEQUENCE: self.to_sequence}[kind](group)

    def node(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        [name] = self.several(op, inputs, 1, **attributes)
        return name

    def several(self, op: str, inputs: Sequence[str], count: int, **attributes: Any) -> list[str]:
        names = [self.names.fresh(op.lower()[:4]) for _ in range(count)]
        self.nodes.append(helper.make_node(op, list(inputs), names, name=self.names.fresh("node"), **attributes))
        return names

    def keep(self, name: str, kind: str, group: str) -> Named:
        value = Named(name, kind, group)
        self.pool.append(value)
        return value

    def const(self, value: Any) -> str:
        return self.names.weight(value)

    def clipped(self, name: str) -> str:
        return self.node("Clip", [name, self.const(np.float32(-TOP)), self.const(np.float32(TOP))])

    def anywhere(self) -> Named:
        return self.pick(ROWS)

    def vector(self, count: Named | str) -> str:
        name = count if isinstance(count, str) else count.name
        return self.node("Reshape", [name, self.const([1])])

    def row_sums(self, rows: Named) -> str:
        return self.node("ReduceSum", [rows.name, self.const([1])], keepdims=0)

    # --- values of a kind out of others ---

    def rows_of(self, group: str) -> Named:
        known = next(each for each in self.pool if each.group == group and each.kind in (INTS, MASK, ROUNDED))
        if known.kind == ROUNDED:
            zeros = self.node("Mul", [self.node("Cast", [known.name], to=TensorProto.INT32), self.const(np.int32(0))])
            return self.keep(self.node("Cast", [zeros], to=TensorProto.FLOAT), ROWS, group)
        table = np.arange(21, dtype=np.float32).reshape(7, 3) - 10
        ids = known.name if known.kind == INTS else self.node("Cast", [known.name], to=TensorProto.INT64)
        return self.keep(self.node("Gather", [self.const(table), ids], axis=0), ROWS, group)

    def to_ints(self, group: str | None = None) -> Named:
        rows = self.pick(ROWS, group)
        whole = self.node("Cast", [self.row_sums(rows)], to=TensorProto.INT64)
        return self.keep(self.node("Mod", [whole, self.const(np.int64(7))]), INTS, rows.group)

    def to_mask(self, group: str | None = None) -> Named:
        rows = self.pick(ROWS, group)
        level = self.const(np.float32(self.whole(-3, 3)))
        return self.keep(self.node("Greater", [self.row_sums(rows), level]), MASK, rows.group)

    def to_count(self, group: str | None = None) -> Named:
        way = self.whole(0, 3)
        if way == 0:
            mask = self.pick(MASK)
            total = self.node("ReduceSum", [self.node("Cast", [mask.name], to=TensorProto.INT64)], keepdims=0)
        elif way == 1:
            total = self.node("Size", [self.anywhere().name])
        elif way == 2:
            total = self.node(
                "Gather", [self.node("Shape", [self.anywhere().name]), self.const(np.int64(self.whole(0, 1)))], axis=0
            )
        else:
            total = self.node("ReduceSum", [self.pick(INTS).name], keepdims=0)
        return self.keep(self.node("Mod", [total, self.const(np.int64(self.whole(1, 9)))]), COUNT, "")

    def to_sequence(self, group: str | None = None) -> Named:
        way = self.whole(0, 2)
        rows = self.anywhere()
        if way == 0:
            made = self.node("SequenceConstruct", [self.anywhere().name for _ in range(self.whole(1, 3))])
        elif way == 1:
            first = self.node("SequenceConstruct", [self.anywhere().name])
            made = self.node("SequenceInsert", [first, rows.name])
        else:
            table = self.const(np.arange(12, dtype=np.float32).reshape(4, 3))
            made = self.node("SplitToSequence", [table, self.const(np.array([1, 3]))], axis=0)
        return self.keep(made, SEQUENCE, self.names.fresh("s"))

    # --- steps: each adds at least one value to the pool ---

    def step(self) -> None:
        """One more step, weighted by how often it stands in the list."""
        plain: list[Callable[[], Any]] = [
            *[self.unary, self.binary, self.rounded] * 3,
            *[self.cast, self.matrix, self.reduced, self.integers, self.to_mask, self.masks, self.to_count] * 2,
            *(self.counts, self.to_ints, self.selected, self.looked_up, self.scattered, self.unique, self.ranged),
            *(self.filled, self.resized_rows, self.joined, self.best, self.one_hot, self.to_sequence, self.sequences),
            *(self.text, self.normalized, self.scattered_elements, self.halves),
        ]
        deep = [self.condition, self.loop, self.growing_loop, self.scan, self.collected] if self.depth < 2 else []
        steps = plain + deep * (2 if self.depth == 0 else 1)
        steps[self.whole(0, len(steps) - 1)]()

    def unary(self) -> None:
        rows = self.anywhere()
        self.keep(self.node(["Neg", "Abs", "Relu", "Identity", "Ceil", "Sign"][self.whole(0, 5)], [rows.name]), ROWS, rows.group)

    def binary(self) -> None:
        one = self.anywhere()
        op = ["Add", "Sub", "Mul", "Max", "Min"][self.whole(0, 4)]
        if self.whole(0, 2):
            other = self.pick(ROWS, one.group).name
        else:
            other = self.const(np.array([[2, -1, 3]], np.float32))
        self.keep(self.clipped(self.node(op, [one.name, other])), ROWS, one.group)

    def rounded(self) -> None:
        source = [each for each in self.pool if each.kind in (ROWS, ROUNDED)]
        value = source[-1 - self.whole(0, min(len(source), 8) - 1)]
        op = ["Sin", "Tanh", "Sigmoid", "Softmax", "Cos"][self.whole(0, 4)]
        self.keep(self.node(op, [value.name]), ROUNDED, value.group)

    def normalized(self) -> None:
        rows = self.anywhere()
        scale = self.const(np.array([1, 2, 0.5], np.float32))
        self.keep(self.node("LayerNormalization", [rows.name, scale], axis=-1), ROUNDED, rows.group)

    def cast(self) -> None:
        rows = self.anywhere()
        kind = [TensorProto.INT32, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.INT8, TensorProto.INT64][self.whole(0, 4)]
        there = self.node("Cast", [rows.name], to=kind)
        self.keep(self.node("Cast", [there], to=TensorProto.FLOAT), ROWS, rows.group)

    def matrix(self) -> None:
        rows = self.anywhere()
        square = np.array([[1, 0, -1], [0, 1, 1], [1, -1, 0]], np.float32)
        self.keep(self.clipped(self.node("MatMul", [rows.name, self.const(square)])), ROWS, rows.group)

    def reduced(self) -> None:
        rows = self.anywhere()
        if self.whole(0, 1):
            total = self.node("ReduceSum", [rows.name, self.const([0])], keepdims=1)
            self.keep(self.clipped(total), ROWS, "1")
        else:
            top = self.node(["ReduceMax", "ReduceMin"][self.whole(0, 1)], [rows.name, self.const([1])], keepdims=1)
            self.keep(self.clipped(self.node("Add", [rows.name, top])), ROWS, rows.group)

    def integers(self) -> None:
        one = self.pick(INTS)
        other = self.pick(INTS, one.group)
        mixed = self.node(["Add", "Mul", "Sub"][self.whole(0, 2)], [one.name, other.name])
        self.keep(self.node("Mod", [mixed, self.const(np.int64(7))]), INTS, one.group)

    def masks(self) -> None:
        one = self.pick(MASK)
        if self.whole(0, 1):
            self.keep(self.node("Not", [one.name]), MASK, one.group)
        else:
            other = self.pick(MASK, one.group)
            self.keep(self.node(["And", "Or", "Xor"][self.whole(0, 2)], [one.name, other.name]), MASK, one.group)

    def counts(self) -> None:
        one, other = self.pick(COUNT), self.pick(COUNT)
        way = self.whole(0, 3)
        if way < 3:
            mixed = self.node(["Add", "Mul", "Max"][way], [one.name, other.name])
        else:  # a divisor that may be 0 only where nobody looks
            mixed = self.node("Div", [one.name, self.node("Max", [other.name, self.const(np.int64(1))])])
        self.keep(self.node("Mod", [mixed, self.const(np.int64(9))]), COUNT, "")
        if self.whole(0, 1) and self.depth == 0:
            self.declared.append(typed(self.pool[-1]))

    def positions(self, mask: Named) -> str:
        """int64[count] where the mask is set."""
        return self.node("Squeeze", [self.node("NonZero", [mask.name]), self.const([0])])

    def selected(self) -> None:
        mask = self.pick(MASK)
        rows = self.pick(ROWS, mask.group)
        way = self.whole(0, 2)
        if way == 0:
            made = self.node("Compress", [rows.name, mask.name], axis=0)
        elif way == 1:
            made = self.node("Gather", [rows.name, self.positions(mask)], axis=0)
        else:
            made = self.node("GatherND", [rows.name, self.node("Transpose", [self.node("NonZero", [mask.name])])])
        self.keep(made, ROWS, f"where {mask.name}")

    def looked_up(self) -> None:
        ids = self.pick(INTS)
        table = np.arange(21, dtype=np.float32).reshape(7, 3) % 5 - 2
        self.keep(self.node("Gather", [self.const(table), ids.name], axis=0), ROWS, ids.group)

    def scattered(self) -> None:
        mask = self.pick(MASK)
        rows = self.pick(ROWS, mask.group)
        where = self.node("Transpose", [self.node("NonZero", [mask.name])])
        picked = self.node("GatherND", [rows.name, where])
        moved = self.node(["Neg", "Abs", "Identity"][self.whole(0, 2)], [picked])
        target = self.pick(ROWS, mask.group)
        self.keep(self.node("ScatterND", [target.name, where, moved]), ROWS, mask.group)

    def scattered_elements(self) -> None:
        ids = self.pick(INTS)
        updates = self.pick(ROWS, ids.group)
        column = self.node("Unsqueeze", [ids.name, self.const([1])])
        spread = self.node("Expand", [column, self.const([1, 3])])
        data = self.const(np.zeros((7, 3), np.float32))
        made = self.node("ScatterElements", [data, spread, updates.name], axis=0, reduction="max")
        self.keep(made, ROWS, "7")

    def unique(self) -> None:
        ids = self.pick(INTS)
        values, first, inverse, counts = self.several("Unique", [ids.name], 4)
        self.keep(values, INTS, f"unique {ids.name}")
        self.keep(inverse, INTS, f"inverse {ids.name}")  # below 7, as there are at most 7 different ones
        if self.whole(0, 1):
            self.keep(self.node("Mod", [counts, self.const(np.int64(7))]), INTS, f"unique {ids.name}")
        del first  # an output that nobody reads

    def ranged(self) -> None:
        count = self.pick(COUNT)
        made = self.node("Range", [self.const(np.int64(0)), count.name, self.const(np.int64(1))])
        self.keep(self.node("Mod", [made, self.const(np.int64(7))]), INTS, f"times {count.name}")

    def filled(self) -> None:
        count = self.pick(COUNT)
        shape = self.node("Concat", [self.vector(count), self.const([3])], axis=0)
        if self.whole(0, 1):
            value = numpy_helper.from_array(np.array([self.whole(-2, 2)], np.float32))
            made = self.node("ConstantOfShape", [shape], value=value)
        else:
            made = self.node("Expand", [self.const(np.array([[1, 2, 3]], np.float32)), shape])
        self.keep(made, ROWS, f"times {count.name}")

    def resized_rows(self) -> None:
        rows, count = self.anywhere(), self.pick(COUNT)
        group = self.names.fresh("cut")
        way = self.whole(0, 2)
        if way == 0:
            made = self.node("Slice", [rows.name, self.const([0]), self.vector(count), self.const([0])])
        elif way == 1:
            pads = self.node("Concat", [self.const([0, 0]), self.vector(count), self.const([0])], axis=0)
            made = self.node("Pad", [rows.name, pads, self.const(np.float32(self.whole(-1, 1)))])
        else:
            small = self.node("Mod", [self.vector(count), self.const([3])])
            made = self.node("Tile", [rows.name, self.node("Concat", [small, self.const([1])], axis=0)])
        self.keep(made, ROWS, group)

    def joined(self) -> None:
        one, other = self.anywhere(), self.anywhere()
        if len(one.group) + len(other.group) < 120:  # no doubling without end
            self.keep(self.node("Concat", [one.name, other.name], axis=0), ROWS, f"({one.group}+{other.group})")

    def halves(self) -> None:
        mask = self.pick(MASK)
        rows = self.pick(ROWS, mask.group)
        count = self.node("ReduceSum", [self.node("Cast", [mask.name], to=TensorProto.INT64), self.const([0])], keepdims=1)
        length = self.node("Shape", [rows.name], end=1)
        sizes = self.node("Concat", [count, self.node("Sub", [length, count])], axis=0)
        first, rest = self.several("Split", [rows.name, sizes], 2, axis=0)
        self.keep(first, ROWS, f"where {mask.name}")
        self.keep(rest, ROWS, f"where not {mask.name}")

    def best(self) -> None:
        mask = self.pick(MASK)
        rows = self.pick(ROWS, mask.group)
        count = self.node("ReduceSum", [self.node("Cast", [mask.name], to=TensorProto.INT64), self.const([0])], keepdims=1)
        _, where = self.several("TopK", [self.row_sums(rows), count], 2, axis=0, largest=self.whole(0, 1))
        self.keep(self.node("Gather", [rows.name, where], axis=0), ROWS, f"where {mask.name}")

    def one_hot(self) -> None:
        ids = self.pick(INTS)
        three = self.node("Mod", [ids.name, self.const(np.int64(3))])
        made = self.node("OneHot", [three, self.const(np.int64(3)), self.const(np.array([-1, 4], np.float32))])
        self.keep(made, ROWS, ids.group)

    def sequences(self) -> None:
        sequence = self.pick(SEQUENCE)
        way = self.whole(0, 2)
        if way == 0:
            made = self.node("SequenceAt", [sequence.name, self.const(np.int64(-self.whole(0, 1)))])
            self.keep(made, ROWS, self.names.fresh("at"))
        elif way == 1:
            self.keep(self.node("ConcatFromSequence", [sequence.name], axis=0), ROWS, self.names.fresh("all"))
        else:
            self.keep(self.node("SequenceLength", [sequence.name]), COUNT, "")

    def text(self) -> None:
        ids = self.pick(INTS)
        written = self.node("Cast", [ids.name], to=TensorProto.STRING)
        self.keep(self.node("Cast", [written], to=TensorProto.INT64), INTS, ids.group)

    # --- control flow ---

    def test(self) -> str:
        """bool[], known or not."""
        way = self.whole(0, 3)
        if way == 0:
            return self.node("Greater", ["mode", self.const(np.int64(self.whole(0, 2)))])
        if way == 1:
            size = self.node("Size", [self.anywhere().name])
            return self.node("Equal", [self.node("Mod", [size, self.const(np.int64(2))]), self.const(np.int64(0))])
        if way == 2:
            total = self.node("ReduceSum", [self.anywhere().name], keepdims=0)
            return self.node("Greater", [total, self.const(np.float32(self.whole(-2, 2)))])
        return self.node("Greater", [self.pick(COUNT).name, self.const(np.int64(self.whole(0, 3)))])

    def inner(self, extra: Sequence[Named] = ()) -> Maker:
        return Maker(self.draw, self.names, [*self.pool, *extra], self.depth + 1)

    def body(self, maker: Maker, name: str, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[Any]) -> Any:
        return helper.make_graph(maker.nodes, name, list(inputs), list(outputs))

    def given(self, maker: Maker, value: Named) -> onnx.ValueInfoProto:
        """The value as an output of a body, which onnxruntime wants to be made there."""
        return typed(value, maker.node("Identity", [value.name]))

    def condition(self) -> None:
        rows = self.anywhere()
        test = self.test()
        equal = self.whole(0, 1)
        branches = {}
        for branch in ("then_branch", "else_branch"):
            maker = self.inner()
            for _ in range(self.whole(1, 4)):
                maker.step()
            last = maker.pick(ROWS, rows.group if equal else None)
            branches[branch] = self.body(maker, branch, [], [self.given(maker, last)])
        made = self.node("If", [test], **branches)
        self.keep(made, ROWS, rows.group if equal else self.names.fresh("if"))

    def loop_head(self) -> tuple[str, str, Named, list[onnx.ValueInfoProto]]:
        """Trip count, first condition, the trip's number, and the body's first two inputs."""
        way = self.whole(0, 2)
        if way == 0:
            trips = self.const(np.int64(self.whole(0, 4)))
        else:
            trips = self.node("Mod", [self.pick(COUNT).name, self.const(np.int64(4))])
        start = "" if self.whole(0, 2) else self.test()
        number, on = self.names.fresh("trip"), self.names.fresh("on")
        head = [
            helper.make_tensor_value_info(number, TensorProto.INT64, ()),
            helper.make_tensor_value_info(on, TensorProto.BOOL, ()),
        ]
        return trips, start, Named(number, COUNT, ""), head

    def goes_on(self, maker: Maker, head: Sequence[onnx.ValueInfoProto]) -> onnx.ValueInfoProto:
        name = maker.node("Identity", [head[1].name]) if self.whole(0, 1) else maker.node("Identity", [maker.test()])
        return helper.make_tensor_value_info(name, TensorProto.BOOL, ())

    def loop(self) -> None:
        start = self.anywhere()
        trips, first, number, head = self.loop_head()
        carried = Named(self.names.fresh("carried"), ROWS, start.group)
        maker = self.inner([number, carried])
        for _ in range(self.whole(1, 3)):
            maker.step()
        after = self.given(maker, maker.pick(ROWS, start.group))
        total = maker.node("ReduceSum", [maker.pick(ROWS, start.group).name, self.const([0])], keepdims=1)
        on = self.goes_on(maker, head)
        outputs = [on, after, helper.make_tensor_value_info(total, TensorProto.FLOAT, (1, 3))]
        body = self.body(maker, "loop", [*head, typed(carried)], outputs)
        made, stacked = self.several("Loop", [trips, first, start.name], 2, body=body)
        self.keep(made, ROWS, start.group)
        flat = self.clipped(self.node("Reshape", [stacked, self.const([-1, 3])]))
        self.keep(flat, ROWS, self.names.fresh("trips"))

    def growing_loop(self) -> None:
        start = self.anywhere()
        trips, first, number, head = self.loop_head()
        carried = Named(self.names.fresh("carried"), ROWS, self.names.fresh("grown"))
        maker = self.inner([number, carried])
        for _ in range(self.whole(0, 2)):
            maker.step()
        added = maker.node("Slice", [maker.anywhere().name, self.const([0]), self.const([2]), self.const([0])])
        after = maker.keep(maker.node("Concat", [carried.name, added], axis=0), ROWS, self.names.fresh("grown"))
        body = self.body(maker, "growing", [*head, typed(carried)], [self.goes_on(maker, head), typed(after)])
        made = self.node("Loop", [trips, first, start.name], body=body)
        self.keep(made, ROWS, self.names.fresh("grown"))

    def collected(self) -> None:
        start = self.node("SequenceConstruct", [self.anywhere().name])
        trips, first, number, head = self.loop_head()
        carried = Named(self.names.fresh("tokens"), SEQUENCE, self.names.fresh("s"))
        maker = self.inner([number])
        for _ in range(self.whole(0, 2)):
            maker.step()
        after = Named(maker.node("SequenceInsert", [carried.name, maker.anywhere().name]), SEQUENCE, "")
        body = self.body(maker, "collecting", [*head, typed(carried)], [self.goes_on(maker, head), typed(after)])
        made = self.keep(self.node("Loop", [trips, first, start], body=body), SEQUENCE, self.names.fresh("s"))
        self.keep(self.node("ConcatFromSequence", [made.name], axis=0), ROWS, self.names.fresh("all"))

    def scan(self) -> None:
        rows = self.anywhere()
        state, one = self.names.fresh("state"), self.names.fresh("row")
        maker = self.inner()
        outside = maker.node("ReduceMax", [self.const(np.array([[1, 5, 2]], np.float32)), self.const([0])], keepdims=0)
        mixed = maker.clipped(maker.node("Add", [state, one]))
        op = ["Max", "Sub", "Add"][self.whole(0, 2)]
        emitted = maker.node(op, [mixed, outside])
        row = (TensorProto.FLOAT, (3,))
        body = self.body(
            maker,
            "scan",
            [helper.make_tensor_value_info(name, *row) for name in (state, one)],
            [helper.make_tensor_value_info(name, *row) for name in (mixed, emitted)],
        )
        start = self.const(np.array([1, 0, -1], np.float32))
        last, made = self.several(
            "Scan", [start, rows.name], 2, body=body, num_scan_inputs=1, scan_input_directions=[self.whole(0, 1)]
        )
        self.keep(self.node("Unsqueeze", [last, self.const([0])]), ROWS, "1")
        self.keep(self.clipped(made), ROWS, rows.group)


@dataclass(frozen=True)
class Drawn:
    """A graph and the sizes and seeds of its calls."""

    model: onnx.ModelProto
    sizes: tuple[int, ...]

    def inputs(self, number: int) -> dict[str, np.ndarray]:
        """The inputs of call `number`: whole numbers, other ones in every call."""
        rng = np.random.default_rng(number + 17)
        size = self.sizes[number % len(self.sizes)]
        return {
            "x": rng.integers(-4, 5, (size, 3)).astype(np.float32),
            "ids": rng.integers(0, 7, size),
            "mode": np.array(number % 3, np.int64),
        }

    def __repr__(self) -> str:
        return f"sizes {self.sizes}\n{onnx.printer.to_text(self.model)}"


@st.composite
def graphs(draw: Any, *, nodes: tuple[int, int] = (5, 60)) -> Drawn:
    """Graphs of about that many nodes, bodies included, whose last values and some others are outputs."""
    return build(draw, nodes)


def build(draw: Callable[[Any], Any], nodes: tuple[int, int]) -> Drawn:
    """A graph out of what `draw` gives for a strategy."""
    wanted = draw(st.integers(*nodes))
    names = Names()
    maker = Maker(draw, names)
    maker.keep("x", ROWS, "n")
    maker.keep("ids", INTS, "n")
    maker.keep("mode", COUNT, "")
    while sum(1 for _ in _walk(maker.nodes)) < wanted:
        maker.step()
    made = [value for value in maker.pool if value.name not in ("x", "ids", "mode")]
    chosen = {value.name: value for value in made[-3:]}
    for _ in range(draw(st.integers(0, 3))):
        value = made[draw(st.integers(0, len(made) - 1))]
        chosen[value.name] = value
    outputs = [typed(value) for value in chosen.values()]
    if draw(st.booleans()):
        maker.nodes.append(helper.make_node("Identity", ["x"], ["same"], name="same"))
        outputs.append(helper.make_tensor_value_info("same", TensorProto.FLOAT, (None, 3)))
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ("n", 3)),
        helper.make_tensor_value_info("ids", TensorProto.INT64, ("n",)),
        helper.make_tensor_value_info("mode", TensorProto.INT64, ()),
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in names.weights.items()]
    outs = {value.name for value in outputs}
    inner = [value for value in maker.declared if value.name not in outs]
    graph = helper.make_graph(maker.nodes, "random", inputs, outputs, tensors, value_info=inner)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
    return Drawn(model, tuple(draw(st.lists(st.integers(0, 6), min_size=2, max_size=3, unique=True))))


def _walk(nodes: Sequence[onnx.NodeProto]) -> Any:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _walk(attribute.g.node)
