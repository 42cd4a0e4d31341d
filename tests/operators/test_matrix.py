"""MatMul, Gemm, Einsum and Det against onnxruntime and float64, in both forms."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.operators.gradients import check_gradient
from tests.operators.oracle import compare, host_outputs


def random(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize(
    ("a", "b"),
    [((3, 4), (4, 5)), ((4,), (4,)), ((4,), (4, 5)), ((3, 4), (4,)), ((2, 1, 3, 4), (5, 4, 2)), ((1, 0, 4), (4, 3)),
     ((0, 3, 4), (4, 2)), ((2, 0), (0, 3))],
)  # fmt: skip
def test_mat_mul_shapes(a, b):
    x, y = random(*a), random(*b, seed=1)
    compare("MatMul", [x, y], domain="", opset=13, rtol=1e-5, atol=1e-5, expected=[np.matmul(x, y)])


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64])
def test_integer_mat_mul_is_exact_and_wraps(dtype):
    x = np.array([[2**31 - 1, 3], [5, 7]]).astype(dtype)
    with np.errstate(over="ignore"):
        expected = np.stack([(x[i][:, None] * x).sum(axis=0, dtype=dtype) for i in range(2)])
    compare("MatMul", [x, x], domain="", opset=13, expected=[expected])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_mat_mul_accumulates_in_float32(dtype):
    """A sum of 4096 ones is 4096; accumulated in float16 it stops at 2048."""
    x, y = np.ones((2, 4096), dtype), np.ones((4096, 3), dtype)
    compare("MatMul", [x, y], domain="", opset=13, expected=[np.full((2, 3), 4096, dtype)])


@pytest.mark.parametrize("attributes", [{}, {"alpha": 0.5, "beta": 2.0}, {"transA": 1, "transB": 1, "beta": 0.0}])
@pytest.mark.parametrize("c", [None, (), (5,), (3, 1), (3, 5)])
def test_gemm(attributes, c):
    a = random(4, 3) if attributes.get("transA") else random(3, 4)
    b = random(5, 4, seed=1) if attributes.get("transB") else random(4, 5, seed=1)
    bias = None if c is None else random(*c, seed=2).reshape(c)
    compare("Gemm", [a, b, bias], attributes, domain="", opset=13, rtol=1e-5, atol=1e-5)


def test_gemm_refuses_a_bias_that_would_grow_the_product():
    with pytest.raises(ValueError, match="does not broadcast"):
        host_outputs("Gemm", [random(1, 4), random(4, 5), random(3, 5)], {}, domain="", opset=13)


def test_gemm_1_needs_broadcast_to_be_said():
    inputs = [random(2, 3), random(3, 4), random(4)]
    with pytest.raises(ValueError, match="set broadcast"):
        host_outputs("Gemm", inputs, {}, domain="", opset=6)
    (y,) = host_outputs("Gemm", inputs, {"broadcast": 1}, domain="", opset=6)
    np.testing.assert_allclose(y, inputs[0] @ inputs[1] + inputs[2], rtol=1e-5)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [("ij,jk->ik", [(2, 3), (3, 4)]), ("ij,jk", [(2, 3), (3, 4)]), ("...ij,...jk->...ik", [(5, 2, 3), (1, 3, 4)]),
     ("bii->bi", [(2, 3, 3)]), ("bii", [(2, 3, 3)]), ("bB,Bb->B", [(2, 3), (3, 2)]), ("ij,ij,ij->", [(2, 3)] * 3),
     ("i , j -> i j", [(2,), (3,)]), ("...i->...", [(2, 4, 3)]), ("ij->ji", [(0, 3)]), ("bhwc,hkc->bhwk", [(1, 2, 3, 4), (2, 5, 4)])],
)  # fmt: skip
def test_einsum(equation, shapes):
    inputs = [random(*shape, seed=k) for k, shape in enumerate(shapes)]
    expected = np.einsum(equation.replace(" ", ""), *(x.astype(np.float64) for x in inputs))
    compare("Einsum", inputs, {"equation": equation}, domain="", opset=12, rtol=1e-5, atol=1e-5,
            expected=[np.asarray(expected, np.float32)])  # fmt: skip


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8])
def test_einsum_of_integers(dtype):
    x = np.arange(6).reshape(2, 3).astype(dtype)
    compare("Einsum", [x, x.T], {"equation": "ij,jk->ik"}, domain="", opset=12, expected=[x @ x.T])


def test_einsum_of_halves_accumulates_in_float32():
    x = np.ones((2, 4096), np.float16)
    compare("Einsum", [x], {"equation": "ij->i"}, domain="", opset=12, expected=[np.full(2, 4096, np.float16)])


@pytest.mark.parametrize("shape", [(3, 3), (2, 4, 4), (1, 1), (0, 0), (0, 3, 3), (2, 0, 0)])
def test_det(shape):
    x = random(*shape)
    compare("Det", [x], domain="", opset=11, rtol=1e-4, atol=1e-5,
            expected=[np.asarray(np.linalg.det(x.astype(np.float64)), np.float32)])  # fmt: skip


def test_gradients():
    f = np.float64
    check_gradient("MatMul", [random(2, 3, 4, dtype=f), random(4, 5, dtype=f)])
    check_gradient(
        "Gemm", [random(4, 3, dtype=f), random(4, 5, dtype=f), random(5, dtype=f)], {"transA": 1, "alpha": 0.3}
    )
    check_gradient("Einsum", [random(2, 3, dtype=f), random(3, 4, dtype=f)], {"equation": "ij,jk->k"})
    check_gradient("Det", [random(2, 3, 3, dtype=f)])
