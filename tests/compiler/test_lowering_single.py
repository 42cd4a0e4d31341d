"""Forms of single operators, outside of chains of convolutions: alone and together as the plain form, and as onnxruntime."""

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


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("count", [3, 20, 37])
@pytest.mark.parametrize("dtype", ["float", "float16", "int32", "uint8", "int8", "int64", "double"])
def test_top_k_of_much_of_a_row(dtype, count, largest):
    """Equal values by lower index, both zeros equal, infinities, numbers at the ends of the dtype."""
    numpy = {"float": "float32", "double": "float64"}.get(dtype, dtype)
    rng = np.random.default_rng(count)
    x = rng.integers(-3 if dtype[0] != "u" else 0, 4, (2, 37, 3)).astype(numpy)
    if dtype[0] in "fd":
        x[0, 5:9, 0] = [-0.0, 0.0, np.inf, -np.inf]
        x[:, ::4] *= numpy == "float16" or np.float32(1e-41)
    else:
        x[0, 5:7, 0] = np.iinfo(numpy).min, np.iinfo(numpy).max
    made = proto(
        [node("TopK", ["x", "k"], ["y", "at"], axis=1, largest=largest)],
        [f"x:{dtype}[2,37,3]"],
        [f"y:{dtype}[...]", "at:int64[...]"],
        {"k": np.array([count])},
        opset=24,
    )
    expected = _sorted_stably(x, count, largest)
    taken = set()
    for chosen, session in forms(made):
        if chosen in ((), ALL):
            found = session({"x": x})
            np.testing.assert_array_equal(found["at"], expected)
            np.testing.assert_array_equal(found["y"], np.take_along_axis(x, expected, 1))
            taken |= {name for segment in session.cache.segments() for _, _, name in segment.lowerings}
    assert taken == ({"packed sort"} if count > 3 and np.dtype(numpy).itemsize <= 4 else set())


def _sorted_stably(x, count, largest):
    """Positions by a stable sort of Python's, rows along axis 1."""
    place = np.empty((x.shape[0], count, x.shape[2]), np.int64)
    for row in np.ndindex(x.shape[0], x.shape[2]):
        values = x[row[0], :, row[1]].tolist()
        order = sorted(range(len(values)), key=lambda i: values[i], reverse=bool(largest))
        place[row[0], :, row[1]] = order[:count]
    return place


def test_top_k_takes_nan_for_the_largest():
    x = random(2, 9)
    x[0, 3], x[1, 8] = np.nan, -np.nan
    for largest, first in ((1, [3, 8]), (0, None)):
        made = proto(
            [node("TopK", ["x", "k"], ["y", "at"], largest=largest)],
            ["x:float[2,9]"],
            ["y:float[...]", "at:int64[...]"],
            {"k": np.array([9])},
        )
        for chosen, session in forms(made):
            if chosen in ((), ALL):
                at = session({"x": x})["at"]
                assert at[:, 0 if first else -1].tolist() == [3, 8]


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("name", ["Sin", "Cos"])
@pytest.mark.parametrize("reach", [4.0, 999_000.0, 1e30])
def test_angles(reach, name, dtype):
    """Against float64: as the polynomials, and where one angle of all is huge, infinite or no number."""
    reach = reach if dtype == "float" else min(reach, 60_000.0)
    x = random(2000, scale=reach)
    x[:6] = [0.0, -0.0, np.pi / 2, np.pi, reach, -reach]
    x = np.clip(x, -reach, reach).astype("float32" if dtype == "float" else dtype)
    made = proto([node(name, ["x"], ["y"])], [f"x:{dtype}[2000]"], [f"y:{dtype}[...]"])
    with np.errstate(invalid="ignore"):
        want = getattr(np, name.lower())(x.astype(np.float64))
    for chosen, session in forms(made):
        if chosen in ((), ALL, ("small angles",)):
            found = session({"x": x})["y"]
            assert found.dtype == x.dtype
            np.testing.assert_allclose(found, want, rtol=0, atol=1.2e-7 if dtype == "float" else 5e-4)
            taken = {name for segment in session.cache.segments() for _, _, name in segment.lowerings}
            assert taken == ({"small angles"} if chosen else set())


def test_angles_without_an_answer():
    x = random(2000)
    x[3], x[5], x[7] = np.inf, -np.inf, np.nan
    made = proto([node("Sin", ["x"], ["y"])], ["x:float[2000]"], ["y:float[...]"])
    with np.errstate(invalid="ignore"):
        want = np.sin(x.astype(np.float64))
    for chosen, session in forms(made):
        if chosen in ((), ALL):
            np.testing.assert_allclose(session({"x": x})["y"], want, rtol=0, atol=1.2e-7)


@pytest.mark.parametrize("name", ["Sin", "Cos"])
def test_gradients_of_angles(name):
    made = proto([node(name, ["x"], ["y"])], ["x:float[40,50]"], ["y:float[...]"])
    same_gradients(made, {"x": random(40, 50, scale=20.0)})


def test_angles_leave_no_traces_behind():
    """The form branches, which is traced apart: jax would keep its own functions' traces, for every shape."""
    session = Session(proto([node("Sin", ["x"], ["y"])], ["x:float[n]"], ["y:float[n]"]))

    def traces():
        session.cache.clear()
        gc.collect()
        return sum(type(each).__name__ == "JaxprEqn" for each in gc.get_objects())

    before = traces()
    for count in range(2000, 2004):
        session({"x": random(count)})
    assert traces() <= before
