"""Operators that move windows over images and signals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tests.benchmarks.build import Case, Draft, single

__all__ = ["FAMILIES"]


def _conv(
    name: str,
    spatial: Sequence[int],
    channels: tuple[int, int],
    kernel: Sequence[int],
    *,
    stride: int = 1,
    dilation: int = 1,
    group: int = 1,
    padded: bool = True,
) -> Case:
    rank = len(spatial)
    half = [dilation * (each // 2) if padded else 0 for each in kernel]
    return single(
        f"Conv {name}: {channels[0]} → {channels[1]}, {'×'.join(map(str, spatial))}",
        "Conv",
        [(1, channels[0], *spatial)],
        [(channels[1], channels[0] // group, *kernel), (channels[1],)],
        kernel_shape=list(kernel),
        strides=[stride] * rank,
        dilations=[dilation] * rank,
        pads=half * 2,
        group=group,
    )


def convolutions() -> Iterator[Case]:
    """Two spatial dimensions."""
    yield _conv("1×1", (56, 56), (64, 256), (1, 1))
    yield _conv("1×1", (56, 56), (256, 64), (1, 1))
    yield _conv("1×1", (14, 14), (512, 512), (1, 1))
    yield _conv("1×1 stride 2", (56, 56), (256, 512), (1, 1), stride=2)
    yield _conv("3×3", (160, 160), (16, 16), (3, 3))
    yield _conv("3×3", (56, 56), (64, 64), (3, 3))
    yield _conv("3×3", (28, 28), (128, 128), (3, 3))
    yield _conv("3×3", (14, 14), (256, 256), (3, 3))
    yield _conv("3×3", (7, 7), (512, 512), (3, 3))
    yield _conv("3×3 stride 2", (56, 56), (64, 128), (3, 3), stride=2)
    yield _conv("5×5", (28, 28), (32, 96), (5, 5))
    yield _conv("3×3 stride 2, stem", (224, 224), (3, 32), (3, 3), stride=2)
    yield _conv("7×7 stride 2, stem", (224, 224), (3, 64), (7, 7), stride=2)
    yield _conv("16×16 stride 16, patches", (224, 224), (3, 384), (16, 16), stride=16, padded=False)
    yield _conv("3×3 dilated by 2", (28, 28), (64, 64), (3, 3), dilation=2)


def grouped() -> Iterator[Case]:
    """Depthwise and grouped convolutions."""
    yield _conv("depthwise 3×3", (112, 112), (32, 32), (3, 3), group=32)
    yield _conv("depthwise 3×3", (56, 56), (96, 96), (3, 3), group=96)
    yield _conv("depthwise 3×3 stride 2", (56, 56), (96, 96), (3, 3), stride=2, group=96)
    yield _conv("depthwise 5×5", (28, 28), (192, 192), (5, 5), group=192)
    yield _conv("depthwise 7×7", (56, 56), (96, 96), (7, 7), group=96)
    yield _conv("depthwise 3×3 dilated by 2", (28, 28), (192, 192), (3, 3), dilation=2, group=192)
    yield _conv("groups of 4", (28, 28), (128, 128), (3, 3), group=32)
    yield _conv("groups of 16", (28, 28), (64, 64), (3, 3), group=4)
    yield _conv("1×1 in 4 groups", (28, 28), (272, 272), (1, 1), group=4)
    yield _conv("two outputs for each input", (28, 28), (64, 128), (3, 3), group=64)


def signals() -> Iterator[Case]:
    """Other numbers of spatial dimensions."""
    yield _conv("1-D k3", (512,), (256, 256), (3,))
    yield _conv("1-D k7 dilated by 3", (512,), (128, 128), (7,), dilation=3)
    yield _conv("1-D k1", (512,), (256, 256), (1,))
    yield _conv("1-D depthwise k31", (512,), (256, 256), (31,), group=256)
    yield _conv("1-D k400 stride 160, front end", (16000,), (1, 80), (400,), stride=160, padded=False)
    yield _conv("1-D k10 stride 5, stem", (16000,), (1, 128), (10,), stride=5, padded=False)
    yield _conv("unit dimension 1×5", (512, 1), (64, 256), (5, 1))
    yield _conv("3-D 3×3×3", (16, 28, 28), (16, 16), (3, 3, 3))


def transposed() -> Iterator[Case]:
    """ConvTranspose."""
    for name, shape, weight, more in (
        ("k2 stride 2: 128 → 64, 28×28", (1, 128, 28, 28), (128, 64, 2, 2), {"strides": [2, 2]}),
        ("k4 stride 2: 64 → 32, 28×28", (1, 64, 28, 28), (64, 32, 4, 4), {"strides": [2, 2], "pads": [1] * 4}),
        ("k3 stride 1: 64 → 64, 28×28", (1, 64, 28, 28), (64, 64, 3, 3), {"pads": [1] * 4}),
        ("1-D k16 stride 8: 128 → 64, 128", (1, 128, 128), (128, 64, 16), {"strides": [8], "pads": [4, 4]}),
        (
            "depthwise k4 stride 2: 64, 28×28",
            (1, 64, 28, 28),
            (64, 1, 4, 4),
            {"strides": [2, 2], "pads": [1] * 4, "group": 64},
        ),
    ):
        yield single(f"ConvTranspose {name}", "ConvTranspose", [shape], [weight], **more)


def pooling() -> Iterator[Case]:
    """Pooling, and Resize."""
    image = (1, 64, 112, 112)
    yield single(
        "MaxPool 3×3 stride 2: 64, 112×112", "MaxPool", [image], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4
    )
    yield single("MaxPool 2×2 stride 2: 64, 112×112", "MaxPool", [image], kernel_shape=[2, 2], strides=[2, 2])
    yield single("MaxPool 5×5 stride 1: 128, 20×20", "MaxPool", [(1, 128, 20, 20)], kernel_shape=[5, 5], pads=[2] * 4)
    yield single("MaxPool k3: 128, 2000", "MaxPool", [(1, 128, 2000)], kernel_shape=[3], strides=[2])
    yield single("AveragePool 3×3: 64, 56×56", "AveragePool", [(1, 64, 56, 56)], kernel_shape=[3, 3], pads=[1] * 4)
    yield single("AveragePool 2×2 stride 2: 64, 112×112", "AveragePool", [image], kernel_shape=[2, 2], strides=[2, 2])
    yield single("GlobalAveragePool: 512, 28×28", "GlobalAveragePool", [(1, 512, 28, 28)])
    yield single("GlobalMaxPool: 512, 28×28", "GlobalMaxPool", [(1, 512, 28, 28)])
    for name, more in (
        ("nearest × 2", {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
        ("linear × 2, half pixel", {"mode": "linear"}),
        ("linear × 2, align corners", {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
        ("cubic × 2", {"mode": "cubic"}),
    ):
        draft = Draft()
        scales = draft.weight(np.array([1, 1, 2, 2], np.float32))
        yield draft.case(f"Resize {name}: 64, 40×40", draft("Resize", draft.input((1, 64, 40, 40)), "", scales, **more))


def blocks() -> Iterator[Case]:
    """Blocks of convolutional networks."""
    yield _residual()
    yield _inverted()
    yield _dense()
    yield _shuffled()


def _conv_of(draft: Draft, x: str, shape: Sequence[int], *, norm: bool = True, **attributes: object) -> str:
    half = [each // 2 for each in shape[2:]]
    y = draft("Conv", x, draft.weight(shape), pads=half * 2, **attributes)
    if not norm:
        return str(y)
    scale, bias = draft.weight(np.ones(shape[0], np.float32)), draft.weight(np.full(shape[0], 0.1, np.float32))
    return str(draft("BatchNormalization", y, scale, bias, bias, scale))


def _residual() -> Case:
    draft = Draft()
    x = draft.input((1, 256, 28, 28))
    y = draft("Relu", _conv_of(draft, x, (64, 256, 1, 1)))
    y = draft("Relu", _conv_of(draft, y, (64, 64, 3, 3)))
    y = draft("Relu", draft("Add", x, _conv_of(draft, y, (256, 64, 1, 1))))
    return draft.case("bottleneck with BatchNormalization: 256, 28×28", y)


def _inverted() -> Case:
    draft = Draft()
    x = draft.input((1, 32, 56, 56))
    y = draft("HardSwish", _conv_of(draft, x, (128, 32, 1, 1)))
    y = draft("HardSwish", _conv_of(draft, y, (128, 1, 5, 5), group=128))
    squeezed = draft("GlobalAveragePool", y)
    squeezed = draft("Relu", _conv_of(draft, squeezed, (32, 128, 1, 1), norm=False))
    squeezed = draft("HardSigmoid", _conv_of(draft, squeezed, (128, 32, 1, 1), norm=False))
    y = draft("Add", x, _conv_of(draft, draft("Mul", y, squeezed), (32, 128, 1, 1)))
    return draft.case("inverted residual with squeeze and excite: 32, 56×56", y)


def _dense() -> Case:
    draft = Draft()
    x = draft.input((1, 128, 28, 28))
    features, width = x, 128
    for _ in range(3):
        y = draft("Relu", _conv_of(draft, features, (128, width, 1, 1)))
        y = _conv_of(draft, y, (32, 128, 3, 3), norm=False)
        features, width = draft("Concat", features, y, axis=1), width + 32
    return draft.case("three dense layers: 128 + 3 × 32, 28×28", features)


def _shuffled() -> Case:
    draft = Draft()
    x = draft.input((1, 272, 28, 28))
    y = draft("Relu", draft("Conv", x, draft.weight((68, 68, 1, 1)), group=4))
    y = draft("Reshape", y, draft.weight(np.array([1, 4, 17, 28, 28])))
    y = draft("Transpose", y, perm=[0, 2, 1, 3, 4])
    y = draft("Reshape", y, draft.weight(np.array([1, 68, 28, 28])))
    y = draft("Conv", y, draft.weight((68, 1, 3, 3)), pads=[1] * 4, group=68)
    y = draft("Conv", y, draft.weight((272, 17, 1, 1)), group=4)
    return draft.case("channel shuffle: 272, 28×28", draft("Relu", draft("Add", x, y)))


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "convolutions": convolutions,
    "grouped": grouped,
    "signals": signals,
    "transposed": transposed,
    "pooling": pooling,
    "blocks": blocks,
}
