"""Forms of single operators, outside of chains of convolutions: alone and together as the plain form, and as onnxruntime."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.compiler.support import node, proto
from tests.compiler.test_lowering import check, dims, random
from transmuter_async.compiler import to_jax
from transmuter_async.graph import read_model
from transmuter_async.operators import known

GROUPED = {
    "depthwise": ((1, 6, 5, 7), (6, 1, 4, 3), 6),
    "depthwise, two filters": ((2, 4, 5, 4), (4, 2, 3, 3), 4),
    "groups of two": ((2, 6, 4, 5), (6, 3, 3, 2), 3),
    "one element": ((1, 6, 4, 5), (6, 2, 1, 1), 2),
    "a sequence": ((2, 8, 9), (8, 1, 5), 8),
    "a sequence in groups": ((2, 8, 9), (8, 3, 5), 2),
    "a volume": ((1, 4, 3, 4, 3), (4, 1, 2, 3, 2), 4),
}


ENDS = [{}, {"pads": (1, 2)}, {"output_padding": 1}, {"auto_pad": "SAME_UPPER"}]
# onnxruntime makes the output of SAME smaller where a kernel is smaller than the stride.
CASES = [(kind, ends) for kind in GROUPED for ends in ENDS if not (kind == "one element" and "auto_pad" in ends)]


@pytest.mark.parametrize(("stride", "dilation"), [(1, 2), (2, 1), (3, 2)])
@pytest.mark.parametrize(("kind", "ends"), CASES, ids=str)
def test_transposed_convolutions_in_groups(kind, ends, dilation, stride):
    x, w, group = GROUPED[kind]
    rank = len(x) - 2
    attributes = {"strides": [stride] * rank, "dilations": [dilation] * rank, "group": group}
    if "pads" in ends:
        attributes["pads"] = [min(one, dilation * (k - 1)) for one in ends["pads"] for k in w[2:]]
    if "output_padding" in ends:
        attributes["output_padding"] = [min(1, stride - 1)] * rank
    if "auto_pad" in ends:
        attributes["auto_pad"] = ends["auto_pad"]
    weights = {"w": random(*w, seed=1), "b": random(w[1] * group, seed=2)}
    made = proto(
        [node("ConvTranspose", ["x", "w", "b"], ["y"], **attributes)],
        [f"x:float[{dims(x)}]"],
        ["y:float[...]"],
        weights,
    )
    taken = check(made, {"x": random(*x, seed=3)}, some=True)
    assert taken == {"shifted taps" if w[0] == group else "overlapping products"}


@pytest.mark.parametrize("kind", ["depthwise, two filters", "groups of two"])
def test_gradients_of_transposed_convolutions(kind):
    x, w, group = GROUPED[kind]
    made = proto(
        [node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2], pads=[1, 0, 0, 1], group=group)],
        [f"x:float[{dims(x)}]"],
        ["y:float[...]"],
        {"w": random(*w, seed=1)},
    )
    same_gradients(made, {"x": random(*x, seed=3)})


def same_gradients(made, inputs):
    """By every weight and input those of the plain form, which other tests hold to differences."""
    model = read_model(made, known=known)
    found = []
    for options in ({"lowerings": ()}, {}):
        apply, params = to_jax(model, **options)
        loss = lambda params, inputs: (apply(params, inputs)["y"] ** 2).sum()  # noqa: B023, E731
        given = {name: jax.numpy.asarray(value) for name, value in inputs.items()}
        found.append(jax.tree.leaves(jax.grad(loss, argnums=(0, 1))(params, given)))
    for ours, plain in zip(found[1], found[0], strict=True):
        scale = max(1.0, float(abs(np.asarray(plain)).max()))
        np.testing.assert_allclose(ours, plain, rtol=1e-3, atol=1e-5 * scale)
