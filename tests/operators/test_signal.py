"""DFT, STFT and MelWeightMatrix against onnxruntime and numpy in float64, in both forms."""

from __future__ import annotations

import numpy as np
import pytest

from tests.operators.gradients import check_gradient
from tests.operators.oracle import compare, host_outputs


def random(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def pairs(z):
    return np.stack([z.real, z.imag], axis=-1).astype(np.float32)


@pytest.mark.parametrize("length", [None, 16, 30])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("inverse", [0, 1])
def test_dft(length, parts, inverse):
    x = random(2, 21, 3, parts)
    z = x[..., 0].astype(np.float64) if parts == 1 else x[..., 0] + 1j * x[..., 1].astype(np.float64)
    n = None if length is None else np.array(length)
    run = {"inverse": inverse}
    close = {"domain": "", "rtol": 1e-5, "atol": 2e-5}
    whole = (np.fft.ifft if inverse else np.fft.fft)(z, n=length, axis=1)
    compare("DFT", [x, n, np.array(1)], run, opset=20, expected=[pairs(whole)], **close)
    compare("DFT", [x, n], run, opset=17, expected=[pairs(whole)], **close)
    if not inverse and parts == 1:
        compare("DFT", [x, n, np.array(-3)], {"onesided": 1}, opset=20,
                expected=[pairs(np.fft.rfft(z, n=length, axis=1))], **close)  # fmt: skip
    if inverse and parts == 2:
        real = np.fft.irfft(z, n=length, axis=1)[..., None].astype(np.float32)
        compare("DFT", [x, n, np.array(1)], {"onesided": 1, "inverse": 1}, opset=20, expected=[real], **close)


def test_a_long_dft_is_accurate():
    x = random(1, 16000, 1)
    exact = np.fft.rfft(x[..., 0].astype(np.float64), axis=1)
    compare("DFT", [x, None, np.array(1)], {"onesided": 1}, domain="", opset=20, atol=2e-3, expected=[pairs(exact)])


def test_refusals():
    with pytest.raises(ValueError, match="needs real input"):
        host_outputs("DFT", [random(1, 4, 2)], {"onesided": 1}, domain="", opset=20)
    with pytest.raises(ValueError, match="one of the 2 axes before the last"):
        host_outputs("DFT", [random(1, 4, 2), None, np.array(2)], {}, domain="", opset=20)
    with pytest.raises(ValueError, match="do not fit"):
        host_outputs("STFT", [random(1, 4, 1), np.array(2), random(8)], {}, domain="", opset=17)


@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("step", [4, 16])
@pytest.mark.parametrize("window", [False, True])
def test_stft(onesided, step, window):
    signal = random(2, 50, 1)
    inputs = [signal, np.array(step), random(16, seed=1) if window else None, np.array(16)]
    compare("STFT", inputs, {"onesided": onesided}, domain="", opset=17, rtol=1e-4, atol=1e-4)


def test_stft_of_a_complex_signal():
    signal = random(1, 40, 2)
    compare(
        "STFT", [signal, np.array(4), random(16, seed=1)], {"onesided": 0}, domain="", opset=17, rtol=1e-4, atol=1e-4
    )
    with pytest.raises(ValueError, match="no one-sided transform"):
        host_outputs("STFT", [signal, np.array(4), random(16)], {"onesided": 1}, domain="", opset=17)


@pytest.mark.parametrize(
    ("mels", "length", "low", "high"), [(12, 64, 20.0, 7000.0), (40, 512, 0.0, 8000.0), (1, 16, 0.0, 4000.0)]
)
def test_mel_weights(mels, length, low, high):
    inputs = [np.array(mels), np.array(length), np.array(16000), np.array(low, np.float32), np.array(high, np.float32)]
    compare("MelWeightMatrix", inputs, domain="", opset=17, rtol=1e-5, atol=1e-6)


def test_gradients():
    f = np.float64
    check_gradient("DFT", [random(1, 9, 1, dtype=f)], {"onesided": 1}, opset=17)
    check_gradient("STFT", [random(1, 40, 1, dtype=f), np.array(5), random(8, dtype=f)], wanted=[0, 2])
