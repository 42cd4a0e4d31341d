"""Fourier transforms and mel filters: DFT, STFT, MelWeightMatrix. Windows are in `generator.py`."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter_async.graph import dtype_of
from transmuter_async.operators.context import Context
from transmuter_async.operators.numeric import device_index, narrow, widen
from transmuter_async.operators.registry import operator, xp


def _scalar(value: Any, name: str) -> int:
    if value.size != 1:
        raise ValueError(f"{name} must be a scalar, got shape {value.shape}")
    return int(value.reshape(()))


def _complex(x: Any, what: str) -> Any:
    """A complex array from a last axis of size 2, a real one from size 1."""
    if x.ndim < 1 or x.shape[-1] not in (1, 2):
        raise ValueError(f"the last axis of {what} must have size 1 (real) or 2 (complex), got shape {tuple(x.shape)}")
    x = widen(x)
    if x.shape[-1] == 1:
        return x[..., 0]
    if xp(x) is np:
        return np.ascontiguousarray(x).view(np.complex64 if x.dtype == np.float32 else np.complex128)[..., 0]
    return lax.complex(x[..., 0], x[..., 1])


def _forward(x: Any, length: int, axis: int) -> Any:
    """The whole spectrum. That of real input is its first half and the mirror image: exact zeros stay exact in XLA."""
    if xp(x) is np or x.dtype.kind == "c":
        return xp(x).fft.fft(x, n=length, axis=axis)
    half = jnp.fft.rfft(x, n=length, axis=axis)
    mirror = lax.slice_in_dim(half, 1, (length + 1) // 2, axis=axis)
    return jnp.concatenate([half, jnp.conj(jnp.flip(mirror, axis=axis))], axis=axis)


def _pairs(x: Any) -> Any:
    """The real and imaginary parts along a new last axis."""
    m = xp(x)
    return m.stack([m.real(x), m.imag(x)], axis=-1)


def _dft(x: Any, length: int | None, axis: int, inverse: bool, onesided: bool) -> Any:
    dtype = x.dtype
    if not -x.ndim <= axis < x.ndim or axis % x.ndim == x.ndim - 1:
        raise ValueError(f"axis {axis} must be one of the {x.ndim - 1} axes before the last of {tuple(x.shape)}")
    axis %= x.ndim
    signal = _complex(x, "input")
    m = xp(x)
    if length is None:
        length = 2 * (signal.shape[axis] - 1) if inverse and onesided else signal.shape[axis]
    if length < 0:
        raise ValueError(f"a transform cannot have the length {length}")
    if onesided and not inverse and signal.dtype.kind == "c":
        raise ValueError("a one-sided transform needs real input; set onesided to 0")
    if length == 0:  # a sum over nothing; the one bin of a one-sided transform is there all the same
        shape = list(signal.shape)
        shape[axis] = 1 if onesided and not inverse else 0
        return m.zeros((*shape, 1 if onesided and inverse else 2), dtype)
    if onesided and not inverse:
        return narrow(_pairs(m.fft.rfft(signal, n=length, axis=axis)), dtype)
    if onesided:
        return narrow(m.fft.irfft(signal, n=length, axis=axis)[..., None], dtype)
    spectrum = m.fft.ifft(signal, n=length, axis=axis) if inverse else _forward(signal, length, axis)
    return narrow(_pairs(spectrum), dtype)


@operator("DFT", since_version=17, static=("dft_length",))
def dft_17(
    input: Any, dft_length: np.ndarray | None = None, /, *, axis: int = 1, inverse: int = 0, onesided: int = 0
) -> Any:
    """Until version 20 the axis is an attribute, 1 by default."""
    length = None if dft_length is None else _scalar(dft_length, "dft_length")
    return _dft(input, length, axis, bool(inverse), bool(onesided))


@operator("DFT", since_version=20, static=("dft_length", "axis"))
def dft_20(
    input: Any,
    dft_length: np.ndarray | None = None,
    axis: np.ndarray | None = None,
    /,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> Any:
    """The discrete Fourier transform along an axis; the last axis holds real (1) or complex (2) values.

    One-sided forward transforms take real input and give the first half of the spectrum, inverse ones take such a half
    and give real values.
    """
    length = None if dft_length is None else _scalar(dft_length, "dft_length")
    where = -2 if axis is None else _scalar(axis, "axis")
    return _dft(input, length, where, bool(inverse), bool(onesided))


@operator("STFT", since_version=17, static=("frame_step", "frame_length"))
def stft_17(
    signal: Any,
    frame_step: np.ndarray,
    window: Any = None,
    frame_length: np.ndarray | None = None,
    /,
    *,
    onesided: int = 1,
    context: Context,
) -> Any:
    """Transforms of windowed frames: (batch, samples, 1 or 2) gives (batch, frames, bins, 2).

    Complex signals have no one-sided transform; with `onesided` they are refused.
    """
    if signal.ndim == 2:
        signal = signal[..., None]
    if signal.ndim != 3:
        raise ValueError(f"signal must be (batch, samples, 1 or 2), got shape {tuple(signal.shape)}")
    step = _scalar(frame_step, "frame_step")
    if frame_length is not None:
        length = _scalar(frame_length, "frame_length")
    else:
        length = signal.shape[1] if window is None else window.shape[0]
    if window is not None and tuple(window.shape) != (length,):
        raise ValueError(f"window has shape {tuple(window.shape)}, but the frame length is {length}")
    samples = signal.shape[1]
    if step < 1 or length < 1 or samples < length:
        raise ValueError(f"frames of {length} samples every {step} samples do not fit into {samples} samples")
    frames = (samples - length) // step + 1
    x = _complex(signal, "signal")
    context.budget((x.shape[0], frames, length), x.dtype)
    m = xp(signal, window)
    if m is np:
        cut: Any = np.lib.stride_tricks.sliding_window_view(x, length, axis=1)[:, ::step]
    elif step == length:
        cut = m.asarray(x)[:, : frames * length].reshape(x.shape[0], frames, length)
    else:
        index = np.arange(frames)[:, None] * step + np.arange(length)[None, :]
        cut = jnp.take(m.asarray(x), jnp.asarray(device_index(index, x.shape[1])), axis=1, mode="clip")
    if window is not None:
        cut = cut * widen(window).astype(x.dtype)
    if onesided and x.dtype.kind == "c":
        raise ValueError("a complex signal has no one-sided transform; set onesided to 0")
    spectrum = m.fft.rfft(cut, axis=-1) if onesided else _forward(cut, length, -1)
    return narrow(_pairs(spectrum), signal.dtype)


@operator(
    "MelWeightMatrix",
    since_version=17,
    static=("num_mel_bins", "dft_length", "sample_rate", "lower_edge_hertz", "upper_edge_hertz"),
)
def mel_weight_matrix_17(
    num_mel_bins: np.ndarray,
    dft_length: np.ndarray,
    sample_rate: np.ndarray,
    lower_edge_hertz: np.ndarray,
    upper_edge_hertz: np.ndarray,
    /,
    *,
    output_datatype: int = 1,
    context: Context,
) -> Any:
    """Triangular filters of height 1, evenly spaced in mel, over the bins of a one-sided transform: (bins, mels).

    The spacing divides the mel range by num_mel_bins + 2, not + 1, as the standard's test and onnxruntime do.
    """
    mels, length = _scalar(num_mel_bins, "num_mel_bins"), _scalar(dft_length, "dft_length")
    rate = _scalar(sample_rate, "sample_rate")
    if mels < 0 or length < 1 or rate < 1:
        raise ValueError(f"num_mel_bins {mels}, dft_length {length} and sample_rate {rate} must be positive")
    bins = length // 2 + 1
    dtype = dtype_of(output_datatype)
    context.budget((bins, mels), dtype)
    low, high = (
        2595 * math.log10(1 + float(widen(edge).reshape(())) / 700) for edge in (lower_edge_hertz, upper_edge_hertz)
    )
    points = np.arange(mels + 2) * ((high - low) / (mels + 2)) + low
    hertz = 700 * (10 ** (points / 2595) - 1)
    edges = ((length + 1) * hertz // rate).astype(np.int64)
    if edges.min() < 0 or (mels and edges[1:-1].max() >= bins):
        raise ValueError(f"the edges {low} to {high} mel lie outside of the {bins} bins of the transform")
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    place = np.arange(bins)[:, None]
    with np.errstate(all="ignore"):
        rising = np.where((place >= left) & (place <= centre), (place - left) / (centre - left), 0.0)
        falling = np.where((place >= centre) & (place < right), (right - place) / (right - centre), 0.0)
    peak = (place == centre) & (left == centre)
    output = np.where(peak, 1.0, np.where((place >= centre) & (right > centre), falling, rising))
    return np.asarray(output).astype(dtype)
