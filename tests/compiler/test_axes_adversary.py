"""Small random graphs with a padded dimension and a batch: refused, or exactly what they give without padding.

A graph is a list of steps over a pool of values; every step is an operator that somebody once got wrong: windows, masks of
all kinds, statistics, look-ups by what padding computes, functions that padding may take out of their domain. In double
precision a leak can't hide behind rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from transmuter_async.compiler import Batching
from transmuter_async.errors import BatchingRefused, InputError

from .padded_graphs import STEPS, Maker
from .support import Session

NAMES = sorted(STEPS)
PADS: list[dict[str, Any]] = [
    {},
    {"x": 3.0},
    {"x": -1.0, "ids": 1},
    {"x": -np.inf},
    {"x": np.nan, "ids": 3},
    {"x": -1e4},
    {"ids": 9},
]


def calls(batch: int, length: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng((batch, length, seed))
    kept = random.integers(1, length + 1, batch)
    mask = (np.arange(length) < kept[:, None]).astype(np.int64)
    if seed % 3 == 1:  # holes within
        mask[:, 1:] &= random.integers(0, 2, (batch, length - 1))
    if seed in (4, 10):  # a row of nothing, and one that starts with nothing
        mask[-1], kept[-1] = 0, 0
        mask[0, 0] = 0
    if seed == 7:  # lengths that speak of more than there is
        kept += 3
    return {
        "x": random.uniform(0.1, 1, (batch, length, 4)) * (1 if seed % 2 else np.sign(random.uniform(-1, 1, (batch, length, 4)))),
        "mask": mask,
        "ids": random.integers(1, 6, (batch, length)),
        "lengths": kept,
    }  # fmt: skip


Steps = list[tuple[str, int, int]]


def built(steps: Steps, wanted: int) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """The graph, and the same with all of its floats as outputs."""
    maker = Maker()
    for name, i, j in steps:
        STEPS[name](maker, i, j)
    made = [(name, kind) for kind, names in maker.pool.items() for name in names if name not in ("x", "ids", "mask")]
    order = {name: index for index, each in enumerate(maker.nodes) for name in each.output}
    made.sort(key=lambda pair: -order[pair[0]])
    chosen = [made[0], *([made[wanted % len(made)]] if wanted % len(made) else [])]
    return maker.proto(chosen), maker.proto(made)


def meets_what_is_assumed(found: dict[str, np.ndarray]) -> bool:
    """The documented assumptions: finite on data, scores below 4 900 beside masks of -10 000 and less."""
    for array in found.values():
        if array.dtype.kind == "f":
            sizes = np.abs(array[np.isfinite(array)])
            scores = sizes[sizes < 9000]
            if np.isnan(array).any() or (scores.size and scores.max() > 1000) or np.isposinf(array).any():
                return False
    return True


def check(steps: Steps, wanted: int, pad: int, masked: bool, batch: int, length: int, seed: int) -> str:
    made, everything = built(steps, wanted)
    inputs = calls(batch, length, seed)
    rows = Batching(
        batch="b", buckets={"s": [8, 16], "b": [4]}, pad=PADS[pad % len(PADS)], mask="mask" if masked else None
    ) if seed % 4 else Batching(buckets={"s": [8, 16]}, pad=PADS[pad % len(PADS)], mask="mask" if masked else None)  # fmt: skip
    try:
        session = Session(made, batching=rows, compiler="eager")
    except BatchingRefused as refused:
        assert all(each.why for each in refused.mixes)
        return "refused"
    try:
        want = Session(everything, compiler="eager")(inputs)
    except Exception:
        return "wrong without padding"
    if not meets_what_is_assumed(want):
        return "not finite without padding"
    try:
        got = session(inputs)
    except (BatchingRefused, InputError):
        return "refused at the call"
    for name, array in got.items():
        if array.dtype.kind == "f":
            np.testing.assert_allclose(array, want[name], rtol=1e-5, atol=1e-5, err_msg=name)
        else:
            np.testing.assert_array_equal(array, want[name], err_msg=name)
    return "same"


GRAPHS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from([0, 0, 0, 1, 2, 3, 5]), st.integers(0, 60)),
    min_size=1,
    max_size=8,
)


@given(
    GRAPHS,
    st.integers(0, 3),
    st.integers(0, 6),
    st.booleans(),
    st.integers(1, 4),
    st.integers(1, 16),
    st.integers(0, 11),
)
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@example([("conv", 0, 1), ("conv", 0, 7), ("tall again", 0, 0)], 0, 4, True, 2, 5, 1)
def test_a_graph_is_refused_or_the_same_with_padding(
    steps: Steps, wanted: int, pad: int, masked: bool, batch: int, length: int, seed: int
) -> None:
    check(steps, wanted, pad, masked, batch, length, seed)


@pytest.mark.parametrize("name", NAMES)
def test_each_step_by_itself_is_refused_or_the_same(name: str) -> None:
    """And behind a scores step, a mask and one that shifts the padding, so that every rule is reached with something on it."""
    seen = set()
    for j in range(14):
        for before in ([], [("Add number", 0, 3)], [("masked", 0, 0)], [("scores", 0, 0), ("score mask", 0, 0)]):
            seen.add(check([*before, (name, 0, j)], 0, j, True, 2, 5, 1 + j % 3))
    assert seen <= {"refused", "same", "not finite without padding", "refused at the call", "wrong without padding"}
    assert seen & {"refused", "same"}
