"""Pad in all modes and versions, and CenterCropPad."""

from __future__ import annotations

import numpy as np
import pytest

from tests.operators.oracle import compare, host_outputs, traced_outputs


def i64(*values):
    return np.array(values, np.int64)


def f(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(
    ("data", "pads", "mode"),
    [
        (f(3, 4), (1, 2, 0, 1), "constant"),
        (f(3, 4), (-1, 2, 1, -2), "constant"),
        (f(0, 2), (1, 0, 0, 0), "constant"),
        (f(5), (4, 4), "reflect"),
        (f(6), (-2, 2), "reflect"),
        (f(6), (2, -2), "reflect"),
        (f(2, 3), (1, 2, 1, 2), "reflect"),
        (f(6), (-2, 2), "edge"),
        (f(2, 3), (3, 0, 0, 3), "edge"),
        (f(3), (5, 4), "wrap"),
        (f(6), (-2, 3), "wrap"),
        (f(2, 3), (1, 2, 3, 4), "wrap"),
    ],
)
def test_modes_as_onnxruntime(data, pads, mode):
    """Negative amounts remove first; the modes look at what is left."""
    compare("Pad", [data, i64(*pads)], {"mode": mode}, domain="", opset=19)


def test_axes_and_value_as_onnxruntime():
    compare("Pad", [f(2, 3), i64(1, 0), np.array(9, np.float32), i64(-1)], {}, domain="", opset=18)
    compare("Pad", [f(2, 3, 4), i64(1, 2, 3, 4), None, i64(2, 0)], {"mode": "edge"}, domain="", opset=18)


def test_an_int64_value_beyond_float_precision_stays_exact():
    value = np.array(2**62 + 1, np.int64)
    compare("Pad", [i64(1, 2), i64(1, 0), value], {}, domain="", opset=13, expected=[i64(2**62 + 1, 1, 2)])


def test_versions_whose_amounts_were_attributes():
    expected = [np.array([7, 0, 1], np.float32)]
    compare("Pad", [f(2)], {"paddings": (1, 0), "value": 7.0}, domain="", opset=1, expected=expected)
    compare("Pad", [f(2)], {"pads": (1, 0), "value": 7.0}, domain="", opset=2, expected=expected)
    compare(
        "Pad",
        [f(2)],
        {"pads": (1, 1), "mode": "edge"},
        domain="",
        opset=10,
        expected=[np.array([0, 0, 1, 1], np.float32)],
    )


def test_strings_and_booleans_pad_with_their_zero():
    (text,) = host_outputs("Pad", [np.array(["a"], object), i64(1, 0)], {}, domain="", opset=18)
    assert text.tolist() == ["", "a"]
    compare("Pad", [np.array([True]), i64(1, 0)], {}, domain="", opset=18, expected=[np.array([False, True])])


@pytest.mark.parametrize(
    ("data", "rest", "mode", "part"),
    [
        (f(3), [i64(3, 0)], "reflect", "at most 2"),
        (f(6), [i64(5, -2)], "reflect", "at most 3"),
        (f(0, 2), [i64(1, 0, 0, 0)], "edge", "nothing to repeat"),
        (f(3), [i64(-2, -2)], "constant", "remove more"),
        (f(3), [i64(1)], "constant", "two numbers"),
        (f(3), [i64(1, 1), np.zeros(0, np.float32)], "constant", "one element"),
        (f(3), [i64(1, 1)], "mirror", "none of"),
    ],
)
def test_what_is_refused_says_why(data, rest, mode, part):
    for way in (host_outputs, traced_outputs):
        with pytest.raises(ValueError, match=part):
            way("Pad", [data, *rest], {"mode": mode}, domain="", opset=19)


def test_center_crop_pad_puts_the_odd_element_right():
    x = f(5, 2)
    expected = np.zeros((2, 5), np.float32)
    expected[:, 1:3] = x[1:3]
    compare("CenterCropPad", [x, i64(2, 5)], {}, domain="", opset=18, expected=[expected])
    compare("CenterCropPad", [x, i64(5)], {"axes": (-1,)}, domain="", opset=18, expected=[np.pad(x, ((0, 0), (1, 2)))])
