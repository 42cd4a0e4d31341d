"""Moving elements: against onnxruntime in both forms, the old versions, and the cases that others get wrong."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.operators.oracle import compare, host_outputs, traced_outputs

LAST = 2**63 - 1


def i64(*values):
    return np.array(values, np.int64)


def f(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def same(op, inputs, expected, attributes=None, *, opset=18):
    compare(op, inputs, attributes, domain="", opset=opset, outputs=len(expected), expected=expected)


def as_onnxruntime(op, inputs, attributes=None, *, opset=18, outputs=1):
    compare(op, inputs, attributes, domain="", opset=opset, outputs=outputs)


# Each is an operator, its inputs and its attributes, at opset 18.
CASES = [
    ("Reshape", [f(2, 2, 3, 2), i64(-1, 0, 0)], {}),  # onnxruntime#15203: a zero keeps the dimension at its index
    ("Reshape", [f(2, 3), i64(3, -1)], {}),
    ("Reshape", [f(0, 4), i64(-1)], {}),
    ("Reshape", [f(0, 4), i64(4, 0)], {"allowzero": 1}),
    ("Reshape", [f(1), i64()], {}),
    ("Flatten", [f(2, 3, 4)], {"axis": -1}),
    ("Flatten", [f(2, 3, 4)], {"axis": 3}),
    ("Flatten", [f(2, 3, 4)], {"axis": 0}),
    ("Transpose", [f(2, 3, 4)], {}),
    ("Transpose", [f(2, 0, 4)], {"perm": [1, 2, 0]}),
    ("Squeeze", [f(1, 2, 1)], {}),
    ("Squeeze", [f(1, 2, 1), i64()], {}),
    ("Squeeze", [f(1, 2, 1), i64(-1)], {}),
    ("Unsqueeze", [f(2, 3), i64(-1, 0)], {}),
    ("Shape", [f(2, 3, 4)], {"start": -2, "end": 9}),
    ("Shape", [f(2, 3, 4)], {"start": 2, "end": 1}),
    ("Size", [f(2, 0, 4)], {}),
    ("Expand", [f(3, 1), i64(2, 1, 4)], {}),
    ("Expand", [f(2, 1), i64(2, 0)], {}),
    ("Tile", [f(2, 3), i64(2, 0)], {}),
    ("Tile", [f(2, 3), i64(2, 3)], {}),
    ("Concat", [f(2, 0), f(2, 3)], {"axis": -1}),
    ("Slice", [f(5), i64(-1), i64(-LAST), i64(0), i64(-2)], {}),
    ("Slice", [f(5), i64(10), i64(-6), i64(0), i64(-1)], {}),
    ("Slice", [f(5), i64(-100), i64(LAST), i64(0), i64(2)], {}),
    ("Slice", [f(4, 5), i64(3, 1), i64(0, LAST), i64(0, 1), i64(-1, 3)], {}),
    ("Slice", [f(4, 5), i64(3), i64(1), i64(1)], {}),
    ("Slice", [f(0, 5), i64(-1), i64(-LAST), i64(0), i64(-1)], {}),
    ("Slice", [f(4, 5), i64(1), i64(2)], {}),
    ("DepthToSpace", [f(1, 8, 2, 3)], {"blocksize": 2, "mode": "CRD"}),
    ("DepthToSpace", [f(1, 8, 2, 3)], {"blocksize": 2}),
    ("SpaceToDepth", [f(1, 2, 4, 6)], {"blocksize": 2}),
    ("ReverseSequence", [f(4, 3, 2), i64(0, 3, 4)], {}),
    ("ReverseSequence", [f(3, 4), i64(1, 2, 4)], {"batch_axis": 0, "time_axis": 1}),
    ("Trilu", [f(2, 3, 4), i64(1).reshape(())], {}),
    ("Trilu", [f(3, 2), i64(-1).reshape(())], {"upper": 0}),
    ("Trilu", [f(0, 2)], {}),
]


@pytest.mark.parametrize(
    ("op", "inputs", "attributes"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_as_onnxruntime(op, inputs, attributes):
    as_onnxruntime(op, inputs, attributes)


def test_split_as_onnxruntime():
    as_onnxruntime("Split", [f(7, 2)], {"num_outputs": 3}, outputs=3)
    as_onnxruntime("Split", [f(4)], {"num_outputs": 3}, outputs=3)  # the last part is empty
    as_onnxruntime("Split", [f(7), i64(3, 0, 4)], {}, outputs=3)
    as_onnxruntime("Split", [f(2, 6)], {"axis": -1}, outputs=3, opset=13)


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "opset", "outputs", "part"),
    [
        ("Split", [f(5)], {"num_outputs": 4}, 18, 4, "negative last part"),
        ("Split", [f(7)], {}, 13, 3, "does not divide"),
        ("Split", [f(7), i64(3, 3)], {}, 18, 2, "do not make up"),
        ("Reshape", [f(2, 3), i64(4, -1)], {}, 18, 1, "no multiple"),
        ("Reshape", [f(0, 3), i64(0, -1)], {"allowzero": 1}, 18, 1, "both 0 and -1"),
        ("Reshape", [f(2, 3), i64(7)], {}, 18, 1, "element counts"),
        ("Reshape", [f(2), i64(1, 0)], {}, 18, 1, "does not have"),
        ("Squeeze", [f(2, 1), i64(0)], {}, 18, 1, "only 1 can be squeezed"),
        ("Unsqueeze", [f(2), i64(0, -3)], {}, 18, 1, "twice"),
        ("Expand", [f(2, 1), i64(-1, 3)], {}, 18, 1, "negative"),
        ("Expand", [f(2), i64(3)], {}, 18, 1, "broadcast"),
        ("Transpose", [f(2, 3)], {"perm": [0, 0]}, 18, 1, "twice"),
        ("Concat", [f(2), f(2, 3)], {"axis": 0}, 18, 1, "differ"),
        ("Slice", [f(3), i64(0), i64(1), i64(0), i64(0)], {}, 18, 1, "step"),
        ("Slice", [f(3), i64(0), i64(1), i64(1)], {}, 18, 1, "outside"),
    ],
)
def test_what_is_refused_says_why(op, inputs, attributes, opset, outputs, part):
    for way in (host_outputs, traced_outputs):
        with pytest.raises(ValueError, match=part):
            way(op, inputs, attributes, domain="", opset=opset, outputs=outputs)


def test_reshape_of_an_empty_batch_keeps_the_rest():
    """The kept zero cancels; onnxruntime 1.32 refuses this case."""
    same("Reshape", [f(0, 4), i64(0, -1)], [f(0, 4)])
    same("Reshape", [f(0, 4), i64(0, 2, -1)], [f(0, 2, 2)])


def test_versions_whose_arguments_were_attributes():
    same("Reshape", [f(2, 3)], [f(3, 2)], {"shape": (3, 2), "consumed_inputs": (0,)}, opset=1)
    same("Squeeze", [f(1, 2, 1)], [f(1, 2)], {"axes": (2,)}, opset=11)
    same("Unsqueeze", [f(2)], [f(1, 2, 1)], {"axes": (0, 2)}, opset=1)
    same("Slice", [f(3, 4)], [f(3, 4)[1:, :2]], {"starts": (1, 0), "ends": (9, -2), "axes": (0, 1)}, opset=9)
    same("Split", [f(5)], [f(5)[:2], f(5)[2:]], {"split": (2, 3)}, opset=2)
    same("Split", [f(4)], [f(4)[:2], f(4)[2:]], {}, opset=1)
    same("Split", [f(4), np.array([1, 3], np.float32)], [f(4)[:1], f(4)[1:]], {}, opset=1)
    same("Concat", [f(2, 1), f(2, 2)], [np.concatenate([f(2, 1), f(2, 2)], 1)], {}, opset=1)
    same("Tile", [f(2, 1), np.array(3, np.float32), np.array(1, np.float32)], [f(2, 1).repeat(3, 1)], {}, opset=1)
    same("Shape", [f(2, 3)], [i64(2, 3)], {}, opset=13)
    same("DepthToSpace", [f(1, 4, 1, 1)], [f(1, 1, 2, 2)], {"blocksize": 2}, opset=1)


def test_space_to_depth_inverts_depth_to_space_in_both_orders():
    x = f(2, 8, 3, 5)
    for mode in ("DCR", "CRD"):
        (deep,) = host_outputs("DepthToSpace", [x], {"blocksize": 2, "mode": mode}, domain="", opset=28)
        same("SpaceToDepth", [deep], [x], {"blocksize": 2, "mode": mode}, opset=28)


def test_a_shape_is_known_while_tracing():
    def sized(x):
        (shape,) = host_outputs("Shape", [x], {}, domain="", opset=15)
        (size,) = host_outputs("Size", [x], {}, domain="", opset=13)
        assert isinstance(shape, np.ndarray) and isinstance(size, np.ndarray)
        return x.reshape(int(size))

    assert jax.jit(sized)(f(2, 3)).shape == (6,)


@pytest.mark.parametrize(
    "dtype",
    [
        "int2",
        "uint2",
        "int4",
        "uint4",
        "float4_e2m1fn",
        "float8_e4m3fn",
        "float8_e5m2",
        "bfloat16",
        "bool",
        "complex64",
        "uint64",
    ],
)
def test_every_dtype_moves_unchanged(dtype):
    """XLA's CPU compiler ends the process over a concatenation of 2-bit integers."""
    kind = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    x = np.array([[0, 1, 1], [1, 0, 1]]).astype(kind)
    same("Concat", [x, x], [np.concatenate([x, x])], {"axis": 0})
    same("Transpose", [x], [x.T])
    same("Slice", [x, i64(-1), i64(-LAST), i64(1), i64(-1)], [x[:, ::-1]])
    same("Tile", [x, i64(2, 1)], [np.tile(x, (2, 1))])
    same("Expand", [x, i64(2, 2, 3)], [np.broadcast_to(x, (2, 2, 3))])
    same("Split", [x], [x[:, :1], x[:, 1:2], x[:, 2:]], {"axis": 1, "num_outputs": 3})
    same("Trilu", [x], [np.where(np.triu(np.ones((2, 3), bool)), x, np.zeros((), kind))], opset=14)


def test_strings_move_too():
    x = np.array([["a", "b"], ["c", ""]], object)
    for op, inputs, attributes, expected in (
        ("Concat", [x, x], {"axis": 1}, np.concatenate([x, x], 1)),
        ("Transpose", [x], {}, x.T),
        ("Reshape", [x, i64(-1)], {}, x.reshape(-1)),
        ("Tile", [x, i64(1, 2)], {}, np.tile(x, (1, 2))),
        ("Identity", [x], {}, x),
    ):
        (got,) = host_outputs(op, inputs, attributes, domain="", opset=18)
        assert got.dtype == object and got.tolist() == expected.tolist()


def test_gradients_follow_the_elements():
    def total(x):
        (flipped,) = host_outputs("Slice", [x, i64(-1), i64(-LAST), i64(1), i64(-1)], {}, domain="", opset=13)
        (moved,) = host_outputs("Transpose", [flipped], {"perm": (1, 0)}, domain="", opset=13)
        (padded,) = host_outputs("Pad", [moved, i64(1, 0, 1, 0)], {"mode": "reflect"}, domain="", opset=18)
        return (padded * f(5, 2)).sum()

    # Row i of `moved` is column 2-i of x; reflection adds rows 1 before and 1 after.
    weights = f(5, 2)
    expected = np.stack([weights[3], weights[2] + weights[0] + weights[4], weights[1]], 1)
    np.testing.assert_allclose(jax.grad(total)(jax.numpy.asarray(f(2, 3))), expected)
