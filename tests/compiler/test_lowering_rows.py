"""Reductions along rows: every form as the plain one and as onnxruntime, gradients too."""

from __future__ import annotations

import gc

import jax
import numpy as np
import pytest

from tests.compiler.support import Session, node, proto
from tests.compiler.test_lowering import ALL, check, dims, forms, random
from transmuter_async.compiler import to_jax
from transmuter_async.graph import read_model
from transmuter_async.operators import known

SHAPES = [(3, 64), (3, 100), (2, 5, 257), (1000,), (0, 70), (2, 63)]
OPERATORS = ["ReduceMax", "ReduceMin", "ReduceSum", "ReduceMean", "ReduceLogSumExp", "Softmax", "LogSoftmax"]
KINDS = {"float32": "float", "float64": "double", "int64": "int64", "int8": "int8"}


def over_rows(operator, shape, kind="float", **attributes):
    if operator.startswith("Reduce"):
        axes = {"axes": np.array([-1])}
        return proto(
            [node(operator, ["x", "axes"], ["y"], **attributes)], [f"x:{kind}[{dims(shape)}]"], ["y:int64[...]"], axes
        )
    return proto([node(operator, ["x"], ["y"], axis=-1, **attributes)], [f"x:{kind}[{dims(shape)}]"], ["y:int64[...]"])


# onnxruntime refuses ReduceLogSumExp of no rows.
CASES = [(o, s) for o in OPERATORS for s in SHAPES if not (o == "ReduceLogSumExp" and 0 in s)]


@pytest.mark.parametrize(("operator", "shape"), CASES, ids=str)
def test_rows(operator, shape):
    taken = check(retyped(over_rows(operator, shape)), {"x": random(*shape)}, some=True)
    wide = shape[-1] >= 64
    lanes = operator not in ("ReduceSum", "ReduceMean") and wide
    product = operator not in ("ReduceMax", "ReduceMin")
    assert taken == {*(["row lanes"] * lanes), *(["row product"] * product)}


def retyped(made, kind="float"):
    made.graph.output[0].type.CopyFrom(made.graph.input[0].type)
    made.graph.output[0].type.tensor_type.ClearField("shape")
    return made


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("operator", ["ReduceMax", "ReduceMin", "ArgMax", "ArgMin"])
def test_extremes_of_every_kind_of_number(operator, dtype):
    x = np.random.default_rng(1).integers(-100, 100, (4, 77)).astype(dtype)  # with many that are equal
    made = over_rows(operator, x.shape, KINDS[dtype])
    if operator.startswith("Reduce"):
        retyped(made)
    want = {"ReduceMax": np.max, "ReduceMin": np.min, "ArgMax": np.argmax, "ArgMin": np.argmin}[operator](
        x, -1, keepdims=True
    )
    for chosen, session in forms(made):
        if chosen in ((), ALL):
            found = session({"x": x})["y"]
            np.testing.assert_array_equal(found, want)
            assert found.dtype == (np.int64 if operator.startswith("Arg") else x.dtype)


@pytest.mark.parametrize("place", [0, 15, 16, 63, 64, 69])
def test_nan_wins_wherever_it_stands_and_infinities_count(place):
    x = random(2, 70)
    x[0, place] = np.nan
    x[1, place] = -np.inf
    for operator, numpy in (("ReduceMax", np.max), ("ReduceMin", np.min)):
        for chosen, session in forms(retyped(over_rows(operator, x.shape))):
            if chosen in ((), ALL):
                np.testing.assert_array_equal(session({"x": x})["y"], numpy(x, -1, keepdims=True))


@pytest.mark.parametrize("operator", ["ReduceMax", "ReduceMin", "Softmax", "ReduceLogSumExp"])
def test_gradients_are_those_of_the_plain_form_also_among_equals(operator):
    x = np.random.default_rng(2).integers(0, 3, (3, 70)).astype(np.float32)
    made = retyped(over_rows(operator, x.shape))
    weights = random(3, 70)

    def gradient(lowerings):
        apply, params = to_jax(read_model(made, known=known), lowerings=lowerings)
        return jax.grad(lambda x: (apply(params, {"x": x})["y"] * weights).sum())(x)

    np.testing.assert_allclose(gradient(ALL), gradient(()), rtol=1e-5, atol=1e-6)


def test_rows_leave_no_traces_behind():
    session = Session(retyped(over_rows("ReduceMax", ("n",))))

    def traces():
        session.cache.clear()
        gc.collect()
        return sum(type(each).__name__ == "JaxprEqn" for each in gc.get_objects())

    session({"x": random(2000)})
    before = traces()
    for count in range(2001, 2005):
        session({"x": random(count)})
    assert traces() <= before
