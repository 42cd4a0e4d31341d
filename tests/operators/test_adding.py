"""What docs/contributing.md says of a new operator is true: one function and its line of registration, nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from onnx import TensorProto, helper

import transmuter_async as tm
from tests.conformance.suite import evaluate
from transmuter_async.errors import UnsupportedModel
from transmuter_async.graph import read_model
from transmuter_async.operators import known, operator, registry, xp

pytestmark = pytest.mark.compiles_itself


@pytest.fixture
def scaled() -> Iterator[None]:
    @operator("ScaledTanh", since_version=1, domain="example")
    def scaled_tanh_1(x: Any, /, *, alpha: float = 2.0) -> Any:
        """alpha * tanh(x)."""
        return x.dtype.type(alpha) * xp(x).tanh(x)

    yield
    del registry._TABLE["example", "ScaledTanh"]
    registry.resolve.cache_clear()


def model() -> Any:
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy"]
    nodes = [helper.make_node("ScaledTanh", ["x"], ["y"], domain="example", alpha=3.0)]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("example", 1)]
    return helper.make_model(helper.make_graph(nodes, "g", info[:1], info[1:]), opset_imports=imports, ir_version=9)


def test_a_new_operator_takes_one_function(scaled: None) -> None:
    x = np.float32([-1, 0, 2])
    found = read_model(model(), known=known)
    assert found.check().ok
    host, _, _ = evaluate(found, {"x": x}, "host")
    compiled, programs, breaks = evaluate(found, {"x": x}, "compiled")
    assert (programs, breaks) == (1, 0)
    for outputs in (host, compiled):
        np.testing.assert_allclose(outputs["y"], 3 * np.tanh(x), rtol=1e-6)
    apply, params = tm.to_jax(found)
    gradient = jax.grad(lambda x: apply(params, {"x": x})["y"].sum())(x)
    np.testing.assert_allclose(gradient, 3 / np.cosh(x) ** 2, rtol=1e-5)
    assert tm.supported_operators()["example"] == {"ScaledTanh": (1,)}


def test_without_it_the_model_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="example:ScaledTanh"):
        tm.run_sync(model(), {"x": np.float32([1])})


def test_a_signature_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="positional-only"):

        @operator("Wrong", since_version=1, domain="example")
        def wrong_1(x: Any) -> Any:
            return x

    with pytest.raises(TypeError, match="defined twice"):

        @operator("Relu", since_version=6)
        def relu_6(X: Any, /) -> Any:
            return X
