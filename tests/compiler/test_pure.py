"""`to_jax`: a pure function that jit, vmap and grad take, whatever the application's 64-bit setting."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from onnx import numpy_helper

from tests.compiler.support import by_onnxruntime, graph, node, proto
from transmuter_async.compiler import pinned, to_jax
from transmuter_async.errors import InputError, NeedsValue
from transmuter_async.graph import read_model
from transmuter_async.operators import known

RNG = np.random.default_rng(2)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.fixture(params=[False, True], ids=["x64 off", "x64 on"])
def x64(request: pytest.FixtureRequest) -> Iterator[bool]:
    with jax.enable_x64(request.param):
        yield request.param


def embedding() -> Any:
    """Ids to class scores, with a convolution, a norm, a pooling, an attention-like product and 64-bit arithmetic."""
    return proto(
        [
            node("Gather", ["table", "ids"], ["e"], name="look up"),
            node("LayerNormalization", ["e", "gamma", "beta"], ["n"], axis=-1),
            node("MatMul", ["n", "w"], ["q"]),
            node("Transpose", ["q"], ["k"], perm=[0, 2, 1]),
            node("MatMul", ["q", "k"], ["s"]),
            node("Softmax", ["s"], ["p"], axis=-1),
            node("MatMul", ["p", "q"], ["a"]),
            node("Transpose", ["a"], ["c0"], perm=[0, 2, 1]),
            node("Conv", ["c0", "kernel", "bias"], ["c1"], pads=[1, 1]),
            node("MaxPool", ["c1"], ["c2"], kernel_shape=[2], strides=[2]),
            node("ReduceMean", ["c2", "last"], ["m"], keepdims=0),
            node("Gemm", ["m", "v", "b"], ["y"]),
            node("Mul", ["ids", "big"], ["keys"]),
        ],
        ["ids:int64[b,s]"],
        ["y:float[b,3]", "keys:int64[b,s]"],
        {
            "table": floats(20, 8),
            "gamma": floats(8),
            "beta": floats(8),
            "w": floats(8, 8),
            "kernel": floats(6, 8, 3),
            "bias": floats(6),
            "v": floats(6, 3),
            "b": floats(3),
            "last": np.array([2]),
            "big": np.array(2**33),
        },
    )


MADE = embedding()
MODEL = read_model(MADE, known=known)
IDS = np.array([[1, 2, 3, 4], [5, 6, 7, 19]])
WANT = by_onnxruntime(MADE, {"ids": IDS})


def check(outputs: Any) -> None:
    np.testing.assert_allclose(outputs["y"], WANT["y"], rtol=1e-4, atol=1e-5)
    assert outputs["keys"].dtype == np.int64
    with pinned():
        np.testing.assert_array_equal(np.asarray(outputs["keys"]), WANT["keys"])


def wide(array: np.ndarray) -> jax.Array:
    with pinned():
        return jax.device_put(array)


@pytest.mark.parametrize("inputs", [IDS, IDS.astype(np.int32), wide(IDS)], ids=["numpy int64", "numpy int32", "device int64"])
def test_apply_alone_and_under_jit(x64: bool, inputs: Any):
    apply, params = to_jax(MODEL)
    assert set(params) == {"table", "gamma", "beta", "w", "kernel", "bias", "v", "b"}
    check(apply(params, {"ids": inputs}))
    check(jax.jit(apply)(params, {"ids": inputs}))


@pytest.mark.parametrize("inputs", [IDS, IDS.astype(np.int32), wide(IDS)], ids=["numpy int64", "numpy int32", "device int64"])
def test_vmap_over_a_batch_axis(x64: bool, inputs: Any):
    apply, params = to_jax(MODEL)

    def one(ids: Any) -> Any:
        outputs = apply(params, {"ids": ids[None]})
        return outputs["y"][0]

    for function in (jax.vmap(one), jax.jit(jax.vmap(one))):
        np.testing.assert_allclose(function(inputs), WANT["y"], rtol=1e-4, atol=1e-5)


def test_grad_by_params_equals_finite_differences(x64: bool):
    apply, params = to_jax(MODEL)
    draw = np.random.default_rng(5)  # small enough a step that no maximum of the pooling changes its place
    direction = {name: draw.standard_normal(array.shape).astype(np.float32) for name, array in params.items()}

    def loss(params: Any, ids: Any) -> Any:
        return jnp.sum(jnp.sin(apply(params, {"ids": ids})["y"]))

    for ids in (IDS, IDS.astype(np.int32)):
        for function in (jax.grad(loss), jax.jit(jax.grad(loss))):
            grads = function(params, ids)
            along = sum(float(jnp.sum(grads[name] * direction[name])) for name in params)
            assert {name: g.dtype for name, g in grads.items()} == {name: p.dtype for name, p in params.items()}

            def moved(step: float) -> float:
                shifted = {name: params[name] + np.float32(step) * direction[name] for name in params}
                return float(np.sum(np.sin(np.asarray(apply(shifted, {"ids": IDS})["y"], np.float64))))

            numeric = (moved(2e-4) - moved(-2e-4)) / 4e-4
            assert along == pytest.approx(numeric, rel=2e-2, abs=2e-2)


def test_grad_by_a_float_input_and_forward_over_reverse(x64: bool):
    made = proto([node("Tanh", ["x"], ["t"]), node("Mul", ["t", "x"], ["y"])], ["x:float[n]"], ["y:float[n]"])
    apply, params = to_jax(read_model(made, known=known))

    def total(x: Any) -> Any:
        return jnp.sum(apply(params, {"x": x})["y"])

    x = floats(5)
    np.testing.assert_allclose(jax.grad(total)(x), np.tanh(x) + x / np.cosh(x) ** 2, rtol=1e-4, atol=1e-6)
    second = jax.hessian(total)(x)
    slope = 1 / np.cosh(x) ** 2
    np.testing.assert_allclose(np.diag(second), 2 * slope - 2 * x * np.tanh(x) * slope, rtol=1e-4, atol=1e-5)


def test_other_params_give_other_answers_and_nothing_is_baked_in(x64: bool):
    apply, params = to_jax(MODEL)
    check(apply(params, {"ids": IDS}))
    zero = {name: jnp.zeros_like(array) for name, array in params.items()}
    np.testing.assert_array_equal(apply(zero, {"ids": IDS})["y"], np.zeros((2, 3), np.float32))


def test_what_jax_has_wrapped_before_we_see_it_is_lost_and_device_put_keeps_it():
    """The limit that the docstring states: with x64 off, jit wraps numpy int64 to 32 bits before `apply` runs."""
    apply, params = to_jax(MODEL)
    made = proto([node("Add", ["ids", "one"], ["y"])], ["ids:int64[n]"], ["y:int64[n]"], {"one": np.array(1)})
    apply, params = to_jax(read_model(made, known=known))
    big = np.array([2**40])
    with jax.enable_x64(False):
        with pinned():
            assert int(apply(params, {"ids": big})["y"][0]) == 2**40 + 1
            kept = jax.device_put(big)
        lost = jax.jit(apply)(params, {"ids": big})["y"]
        kept = jax.jit(apply)(params, {"ids": kept})["y"]
    with pinned():
        assert int(lost[0]) == 1
        assert int(kept[0]) == 2**40 + 1


def test_a_break_under_a_trace_says_what_to_do():
    made = proto(
        [node("Equal", ["sr", "k"], ["c"]), node("If", ["c"], ["y"], then_branch=BRANCHES[0], else_branch=BRANCHES[1])],
        ["x:float[n]", "sr:int64[]"],
        ["y:float[k]"],
        {"k": np.array(16000)},
    )
    model = read_model(made, known=known)
    x = floats(3)
    apply, params = to_jax(model)
    with pytest.raises(NeedsValue, match="the If condition"):
        jax.jit(apply)(params, {"x": x, "sr": np.int32(16000)})
    # A value that is at hand outside of a trace decides the branch ...
    assert apply(params, {"x": x, "sr": np.array(8000)})["y"].shape == (6,)
    # ... and so does one that is fixed from the start.
    for rate, size in ((16000, 3), (8000, 6)):
        apply, params = to_jax(model, static_inputs={"sr": rate})
        assert jax.jit(apply)(params, {"x": x})["y"].shape == (size,)


BRANCHES = (
    graph([node("Add", ["x", "x"], ["a"])], [], ["a:float[n]"]),
    graph([node("Concat", ["x", "x"], ["b"], axis=0)], [], ["b:float[m]"]),
)


@pytest.mark.parametrize("dtype", ["float", "int64"])
def test_bounds_clamp_or_nan(dtype: str):
    made = proto([node("Gather", ["x", "i"], ["y"])], [f"x:{dtype}[n]", "i:int64[m]"], [f"y:{dtype}[m]"])
    model = read_model(made, known=known)
    x = np.array([1, 2, 3], np.float32 if dtype == "float" else np.int64)
    i = np.array([0, 5, -9], np.int32)
    clamp, params = to_jax(model)
    fill, _ = to_jax(model, bounds="nan")
    with pinned():
        np.testing.assert_array_equal(np.asarray(jax.jit(clamp)(params, {"x": x, "i": i})["y"]), x[[0, 2, 0]])
        got = np.asarray(jax.jit(fill)(params, {"x": x, "i": i})["y"])
        bad = np.nan if dtype == "float" else np.iinfo(np.int64).min
        np.testing.assert_array_equal(got, np.array([1, bad, bad], x.dtype))
        np.testing.assert_array_equal(np.asarray(fill(params, {"x": x, "i": i})["y"]), got)


def test_bad_arguments_are_typed_errors():
    apply, params = to_jax(MODEL)
    with pytest.raises(InputError, match=r"'idz' is not an input.*'ids' is missing"):
        apply(params, {"idz": IDS})
    with pytest.raises(InputError, match=r"'ids': shape \(4,\)"):
        apply(params, {"ids": IDS[0]})
    with pytest.raises(InputError, match="'ids': dtype float was given, expected int64"):
        apply(params, {"ids": IDS.astype(np.float32)})
    with pytest.raises(InputError, match=r"static_inputs=\['nope'\]"):
        to_jax(MODEL, static_inputs={"nope": 1})
    with pytest.raises(ValueError, match="bounds='check'"):
        to_jax(MODEL, bounds="check")


def test_inputs_are_held_to_the_declared_shape_and_static_ones_to_their_dtype():
    made = proto([node("Relu", ["x"], ["y"])], ["x:float[2,3]"], ["y:float[2,3]"])
    apply, params = to_jax(read_model(made, known=known))
    with pytest.raises(InputError, match=r"'x': shape \(2, 4\) was given, expected float\[2, 3\]"):
        apply(params, {"x": floats(2, 4)})
    with pytest.raises(InputError, match=r"'x': shape \(2, 4\)"):
        jax.jit(apply)(params, {"x": floats(2, 4)})
    np.testing.assert_array_equal(apply(params, {"x": [[1, -2, 3], [0, 5, -6]]})["y"], [[1, 0, 3], [0, 5, 0]])
    with pytest.raises(InputError, match="inputs are a mapping"):
        apply(params, floats(2, 3))
    with pytest.raises(TypeError, match="to_jax takes a Model, not str"):
        to_jax("model.onnx")  # type: ignore[arg-type]
    made = proto([node("Tile", ["x", "n"], ["y"])], ["x:float[k]", "n:int64[1]"], ["y:float[m]"])
    model = read_model(made, known=known)
    for wrong in ([1.7], [[2]], np.array([2], np.uint64)):
        with pytest.raises(InputError, match="static_inputs do not fit the graph: 'n'"):
            to_jax(model, static_inputs={"n": wrong})
    with pytest.raises(NeedsValue, match=r"static_inputs=\{'n': …\}"):
        jax.jit(to_jax(model)[0])({}, {"x": floats(2), "n": np.array([2])})


def test_params_are_all_there_and_no_others():
    apply, params = to_jax(MODEL)
    less = {name: value for name, value in params.items() if name != "gamma"}
    with pytest.raises(InputError, match=r"missing are \['gamma'\]"):
        apply(less, {"ids": IDS})
    with pytest.raises(InputError, match=r"unknown are \['gama'\]; missing are \['gamma'\]"):
        apply({**less, "gama": params["gamma"]}, {"ids": IDS})


def test_weights_of_branches_are_params():
    """An initializer and a Constant inside of an If, of the same name in both branches: each has its own gradient."""

    def branch(scale: float, op: str) -> Any:
        return graph(
            [
                node("Constant", [], ["c"], value=numpy_helper.from_array(np.full(3, scale, np.float32))),
                node("Mul", ["x", "c"], ["m"]),
                node(op, ["m", "w"], ["r"]),
            ],
            [],
            ["r:float[3]"],
            {"w": np.array([1, 2, 3], np.float32)},
        )

    made = proto(
        [node("If", ["flag"], ["y"], name="if", then_branch=branch(2, "Add"), else_branch=branch(5, "Mul"))],
        ["x:float[3]", "flag:bool[]"],
        ["y:float[3]"],
    )
    x = floats(3)
    for flag in (True, False):
        apply, params = to_jax(read_model(made, known=known), static_inputs={"flag": flag})
        assert len(params) == 4
        want = by_onnxruntime(made, {"x": x, "flag": np.array(flag)})["y"]
        np.testing.assert_allclose(jax.jit(apply)(params, {"x": x})["y"], want, rtol=1e-6)
        grads = jax.grad(lambda params: jnp.sum(apply(params, {"x": x})["y"]))(params)  # noqa: B023
        by_value = {(float(params[name][0]), name.endswith("w")): np.asarray(grad) for name, grad in grads.items()}
        used, unused = (2.0, 5.0) if flag else (5.0, 2.0)
        np.testing.assert_allclose(by_value[used, False], x if flag else x * [1, 2, 3], rtol=1e-6)
        assert not by_value[unused, False].any()
        weights = sorted((grad.tolist() for name, grad in grads.items() if name.endswith("w")), key=any)
        assert weights[0] == [0, 0, 0]
        np.testing.assert_allclose(weights[1], np.ones(3) if flag else 5 * x, rtol=1e-6)


def test_a_seed_may_be_traced_and_may_be_a_key(x64: bool):
    made = proto([node("RandomNormalLike", ["x"], ["y"])], ["x:float[n]"], ["y:float[n]"])
    apply, params = to_jax(read_model(made, known=known))
    inputs = {"x": floats(4)}
    want = np.asarray(apply(params, inputs, seed=7)["y"])
    assert not np.array_equal(want, apply(params, inputs)["y"])
    with jax.default_prng_impl("threefry2x32"):
        key = jax.random.key(7)
    for seed in (np.int64(7), np.array(7, np.uint32), np.array([0, 7], np.uint32), key):
        np.testing.assert_array_equal(apply(params, inputs, seed=seed)["y"], want)
    np.testing.assert_array_equal(jax.jit(apply)(params, inputs, 7)["y"], want)
    np.testing.assert_array_equal(jax.jit(apply)(params, inputs, key)["y"], want)
    negative = jax.jit(apply)(params, inputs, -7)["y"]
    np.testing.assert_array_equal(negative, apply(params, inputs, seed=-7)["y"])
    for wrong in (1.5, np.zeros(3, np.uint32), True):
        with pytest.raises(InputError, match="seed is"):
            apply(params, inputs, seed=wrong)


SETTINGS = {
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "transfer guard": lambda: jax.transfer_guard("disallow"),
    "debug nans": lambda: jax.debug_nans(True),
    "disable jit": lambda: jax.disable_jit(True),
    "matmul precision": lambda: jax.default_matmul_precision("bfloat16"),
    "prng": lambda: jax.default_prng_impl("rbg"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_applications_settings_are_neither_felt_nor_touched(setting: str):
    apply, params = to_jax(MODEL)
    with contextlib.ExitStack() as stack:
        stack.enter_context(SETTINGS[setting]())
        before = dict(jax.config.values)
        outputs = apply(params, {"ids": IDS})
        assert dict(jax.config.values) == before
    check(outputs)


def test_random_nodes_take_the_seed_that_is_given():
    made = proto([node("RandomNormalLike", ["x"], ["r"]), node("Add", ["x", "r"], ["y"])], ["x:float[n]"], ["y:float[n]"])
    apply, params = to_jax(read_model(made, known=known))
    x = np.zeros(32, np.float32)
    jitted = jax.jit(apply)
    one, two = (jitted(params, {"x": x}, seed=np.array([0, s], np.uint32))["y"] for s in (1, 2))
    np.testing.assert_array_equal(one, apply(params, {"x": x}, seed=1)["y"])
    assert not np.allclose(one, two)
