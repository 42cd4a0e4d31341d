"""Piper with its frames padded to buckets: they arise inside of the graph, and its decoder reads across them."""

from __future__ import annotations

import numpy as np
import pytest

from tests import zoo
from tests.models.test_piper import FILE, PACKAGE, TOLERANCE, call, example, noisy, oracle
from transmuter_async.compiler import Batching
from transmuter_async.errors import BatchingRefused, InputError
from transmuter_async.graph import read_model
from transmuter_async.operators import known

from .support import Session

FRAMES = "/ReduceMax_output_0"
"""The largest of the lengths that the durations add up to: the limit of the Range that masks the frames."""
SAMPLES = 256
"""Of the signal, for each frame."""

pytestmark = [pytest.mark.network, pytest.mark.compiles_itself, pytest.mark.timeout(900)]


def batching(*sizes: int) -> Batching:
    return Batching(buckets={FRAMES: sizes})


def at_speed(speed: float) -> dict[str, np.ndarray]:
    """The reference text, slower or faster: another number of frames."""
    inputs = dict(example(0, 0.0)[0])
    inputs["scales"] = np.array([0, speed, 0], np.float32)
    return inputs


@pytest.mark.slow
def test_texts_of_any_number_of_frames_run_one_program_and_sound_as_without_padding() -> None:
    session = Session(noisy(), batching=batching(128))
    seen = set()
    for index, speed in enumerate((1.0, 0.8, 1.3)):
        inputs = at_speed(speed)
        expected = oracle().run(None, inputs)[0]
        got = session(inputs)["output"]
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)
        assert index == 0 or session.compiled() == 0
        assert session.told().count("BreakStarted") == 1
        seen.add(got.shape[-1] // SAMPLES)
    assert len(seen) == 3 and 128 not in seen, "frames that are padded, and three numbers of them"
    assert sum(mask.op_type in ("Conv", "ConvTranspose") for mask in session.prepared.padding.proof.masks) > 10


def test_padding_is_worth_no_more_than_rounding() -> None:
    """On the host form, where both sides compute alike: with noise, too."""
    padded = Session(noisy(), batching=batching(128), compiler="eager")
    plain = Session(noisy(), compiler="eager")
    for inputs in (at_speed(1.0), example(1, 0.8)[0]):
        got, want = padded(inputs)["output"], plain(inputs)["output"]
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_more_frames_than_the_largest_bucket_are_refused_not_cut() -> None:
    with pytest.raises(InputError, match="more than the largest bucket 16"):
        Session(noisy(), batching=batching(16), compiler="eager")(at_speed(1.0))


def test_what_can_not_be_padded_is_named() -> None:
    with pytest.raises(BatchingRefused) as refused:  # attention by relative place pads its rows along the phonemes
        Session(noisy(), batching=Batching(buckets={"phonemes": [128]}))
    assert {(each.op_type, each.axis) for each in refused.value.mixes} == {("Pad", "phonemes")}
    model = read_model(zoo.path(PACKAGE, FILE), known=known)
    with pytest.raises(BatchingRefused) as refused:  # it draws its noise channel by channel
        Session(model, batching=batching(128))
    assert {(each.op_type, each.axis) for each in refused.value.mixes} == {("RandomNormalLike", FRAMES)}
    assert call(0, 0.0)["noise"].shape == (1, 192, 4096)
