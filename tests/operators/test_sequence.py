"""Sequences and optionals; traced tensors in a sequence stay traced."""

from __future__ import annotations

import jax
import numpy as np
import onnx
import onnx.parser
import pytest

from tests.conformance.suite import evaluate
from tests.operators.oracle import host_outputs
from transmuter_async.errors import OperatorError
from transmuter_async.graph import read_model
from transmuter_async.operators import known


def i64(*values):
    return np.array(values, np.int64)


def f(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def one(op, inputs, attributes=None, *, opset=18):
    return host_outputs(op, inputs, attributes or {}, domain="", opset=opset)[0]


A, B, C = f(2), f(3), f(4)


def same(got, expected):
    assert len(got) == len(expected) and all(x is y for x, y in zip(got, expected, strict=True))


def test_insert_erase_and_at_count_from_both_ends():
    same(one("SequenceInsert", [[A, B], C]), [A, B, C])
    same(one("SequenceInsert", [[A, B], C, i64(0).reshape(())]), [C, A, B])
    same(one("SequenceInsert", [[A, B], C, i64(2).reshape(())]), [A, B, C])
    same(one("SequenceInsert", [[A, B], C, i64(-1).reshape(())]), [A, C, B])
    same(one("SequenceErase", [[A, B, C]]), [A, B])
    same(one("SequenceErase", [[A, B, C], i64(-3).reshape(())]), [B, C])
    assert one("SequenceAt", [[A, B], i64(-1).reshape(())]) is B
    length = one("SequenceLength", [[A, B]])
    assert length.dtype == np.int64 and length.shape == () and length == 2
    assert one("SequenceEmpty", [], {"dtype": 7}) == []


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        ("SequenceAt", [[A, B], i64(2)]),
        ("SequenceAt", [[A, B], i64(-3)]),
        ("SequenceAt", [[], i64(0)]),
        ("SequenceErase", [[A], i64(1)]),
        ("SequenceErase", [[]]),
        ("SequenceInsert", [[A], B, i64(2)]),
        ("SequenceInsert", [[A], B, i64(-2)]),
    ],
)
def test_a_position_out_of_range_is_an_error(op, inputs):
    with pytest.raises(OperatorError, match="out of range"):
        one(op, inputs)


def test_a_sequence_is_never_changed_in_place():
    sequence = [A, B]
    one("SequenceInsert", [sequence, C])
    one("SequenceErase", [sequence])
    same(sequence, [A, B])


def test_splitting_into_a_sequence():
    x = f(2, 5)
    for split, attributes, expected in (
        (None, {"axis": 1}, [x[:, i : i + 1] for i in range(5)]),
        (None, {"axis": 1, "keepdims": 0}, [x[:, i] for i in range(5)]),
        (i64(2).reshape(()), {"axis": -1, "keepdims": 0}, [x[:, :2], x[:, 2:4], x[:, 4:]]),
        (i64(1, 4), {"axis": 1}, [x[:, :1], x[:, 1:]]),
    ):
        got = one("SplitToSequence", [x, split], attributes)
        assert len(got) == len(expected)
        for piece, want in zip(got, expected, strict=True):
            np.testing.assert_array_equal(piece, want)
    assert one("SplitToSequence", [f(0, 2)]) == []


def test_joining_a_sequence():
    np.testing.assert_array_equal(one("ConcatFromSequence", [[A, B]], {"axis": -1}), np.concatenate([A, B]))
    np.testing.assert_array_equal(
        one("ConcatFromSequence", [[A, A]], {"axis": -1, "new_axis": 1}), np.stack([A, A], -1)
    )
    with pytest.raises(ValueError, match="empty"):
        one("ConcatFromSequence", [[]], {"axis": 0})


def test_optionals_by_version():
    assert one("Optional", [], {"type": "float"}, opset=15) is None
    assert one("Optional", [A], opset=15) is A
    assert one("OptionalGetElement", [A], opset=18) is A
    assert not one("OptionalHasElement", [None], opset=15)
    assert not one("OptionalHasElement", [], opset=18)
    present = one("OptionalHasElement", [[A]], opset=28)
    assert isinstance(present, np.ndarray) and present.dtype == np.bool_ and present
    with pytest.raises(ValueError, match="empty"):
        one("OptionalGetElement", [None])
    with pytest.raises(ValueError, match="type"):
        one("Optional", [])


def test_sequences_of_traced_tensors_stay_in_one_program():
    text = """<ir_version: 9, opset_import: ["" : 17]>
g (float[N, M] x) => (float[A, B] y, int64 n) <int64 second = {1}, int64 last = {-1}> {
  parts = SplitToSequence <axis = 0> (x)
  mapped = SequenceMap (parts, x) <body = b (float[K, M] p, float[N, M] w) => (float[L, M] q) { q = Add (p, w) }>
  shorter = SequenceErase (mapped, second)
  tail = SequenceAt (shorter, last)
  longer = SequenceInsert (shorter, tail)
  y = ConcatFromSequence <axis = 0> (longer)
  n = SequenceLength (longer)
}"""
    ours = read_model(onnx.parser.parse_model(text), known=known)
    x = f(3, 2)
    expected = np.concatenate([x[:1] + x, x[2:] + x, x[2:] + x])
    for way in ("host", "compiled"):
        outputs, programs, breaks = evaluate(ours, {"x": x}, way)
        np.testing.assert_array_equal(outputs["y"], expected)
        assert outputs["n"] == 3
        assert breaks == 0 and (way == "host" or programs == 1)


def test_a_map_over_nothing_is_nothing():
    text = """<ir_version: 9, opset_import: ["" : 17]>
g (float[N] x) => (int64 n) {
  none = SequenceEmpty <dtype = 1> ()
  mapped = SequenceMap (none, x) <body = b (float[K] p, float[N] w) => (float[N] q) { q = Add (p, w) }>
  n = SequenceLength (mapped)
}"""
    outputs, _, _ = evaluate(read_model(onnx.parser.parse_model(text), known=known), {"x": A}, "compiled")
    assert outputs["n"] == 0


def test_two_bit_integers_join_inside_a_program():
    import ml_dtypes

    x = np.array([0, 1, -2], ml_dtypes.int2)
    with jax.enable_x64(True):
        got = jax.jit(lambda v: one("ConcatFromSequence", [[v, v]], {"axis": 0}))(x)
    np.testing.assert_array_equal(np.asarray(got).astype(np.int8), np.concatenate([x, x]).astype(np.int8))
