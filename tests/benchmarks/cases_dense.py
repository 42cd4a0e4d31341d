"""Products of matrices and what is made of them: attention, norms, recurrent networks, 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
from onnx import TensorProto

from tests.benchmarks.build import MICROSOFT, Case, Draft, single

__all__ = ["FAMILIES"]


def products() -> Iterator[Case]:
    """MatMul and Gemm in float32."""
    for rows, inner, columns in (
        (1, 512, 2048),
        (4, 512, 512),
        (16, 384, 1536),
        (128, 384, 384),
        (128, 384, 1536),
        (512, 512, 512),
        (1, 1024, 32000),
    ):
        yield single(f"MatMul {rows}×{inner}×{columns}", "MatMul", [(rows, inner)], [(inner, columns)])
    yield single("MatMul 12×128×64×128, both inputs", "MatMul", [(12, 128, 64), (12, 64, 128)])
    yield single("Gemm 1×2048×1000, transB", "Gemm", [(1, 2048)], [(1000, 2048), (1000,)], transB=1)
    yield single("Gemm 32×784×256, transB", "Gemm", [(32, 784)], [(256, 784), (256,)], transB=1)
    yield single("Einsum bhid,bhjd->bhij: 12×128×64", "Einsum", [(1, 12, 128, 64)] * 2, equation="bhid,bhjd->bhij")


def norms() -> Iterator[Case]:
    """Norms and reductions."""
    for rows, width in ((128, 384), (512, 768)):
        yield single(f"LayerNormalization {rows}×{width}", "LayerNormalization", [(1, rows, width)], [(width,)] * 2)
        yield _decomposed(rows, width)
    yield _root_mean_square(128, 768)
    yield single("InstanceNormalization 64, 56×56", "InstanceNormalization", [(1, 64, 56, 56)], [(64,)] * 2)
    yield single(
        "GroupNormalization 32 of 128, 28×28",
        "GroupNormalization",
        [(1, 128, 28, 28)],
        [(128,)] * 2,
        opset=21,
        num_groups=32,
    )
    yield single(
        "BatchNormalization 64, 112×112", "BatchNormalization", [(1, 64, 112, 112)], [np.ones(64, np.float32)] * 4
    )
    yield single("LRN 64, 56×56", "LRN", [(1, 64, 56, 56)], size=5)
    yield single("LpNormalization 128×384", "LpNormalization", [(128, 384)])
    yield single("ReduceMean last axis 512×768", "ReduceMean", [(512, 768)], axes=[-1])
    yield single("ReduceSum first axis 512×768", "ReduceSum", [(512, 768)], [np.array([0])])
    yield single("ReduceMax last axis 512×768", "ReduceMax", [(512, 768)], axes=[-1])
    yield single("ArgMax 128×8000", "ArgMax", [(128, 8000)], axis=-1, dtype=TensorProto.INT64)
    yield single("CumSum 128×2000", "CumSum", [(128, 2000)], [np.array(1)])


def _decomposed(rows: int, width: int) -> Case:
    draft = Draft()
    x = draft.input((1, rows, width))
    centred = draft("Sub", x, draft("ReduceMean", x, axes=[-1]))
    variance = draft("ReduceMean", draft("Pow", centred, draft.weight(np.array(2, np.float32))), axes=[-1])
    root = draft("Sqrt", draft("Add", variance, draft.weight(np.array(1e-5, np.float32))))
    y = draft("Add", draft("Mul", draft("Div", centred, root), draft.weight((width,))), draft.weight((width,)))
    return draft.case(f"LayerNormalization in nine nodes {rows}×{width}", y)


def _root_mean_square(rows: int, width: int) -> Case:
    draft = Draft()
    x = draft.input((1, rows, width))
    square = draft("ReduceMean", draft("Mul", x, x), axes=[-1])
    root = draft("Sqrt", draft("Add", square, draft.weight(np.array(1e-6, np.float32))))
    return draft.case(
        f"RMS norm in six nodes {rows}×{width}", draft("Mul", draft("Div", x, root), draft.weight((width,)))
    )


def activations() -> Iterator[Case]:
    """Elementwise operators and Softmax."""
    yield single("Softmax 12×128×128", "Softmax", [(1, 12, 128, 128)])
    yield single("Softmax 1×1000", "Softmax", [(1, 1000)])
    yield single("Softmax 128×8000", "Softmax", [(128, 8000)])
    yield single("LogSoftmax 128×8000", "LogSoftmax", [(128, 8000)])
    wide = (128, 1536)
    for operator in ("Erf", "Exp", "Log", "Tanh", "Sigmoid", "Sin", "HardSwish", "Softplus", "Sqrt", "Elu"):
        inputs = np.random.default_rng(0).uniform(0.1, 3, wide).astype(np.float32)
        yield single(f"{operator} 128×1536", operator, [inputs])
    draft = Draft()
    x = draft.input(wide)
    halves, one = draft.weight(np.array(0.5, np.float32)), draft.weight(np.array(1, np.float32))
    inner = draft("Erf", draft("Div", x, draft.weight(np.array(2**0.5, np.float32))))
    yield draft.case("Gelu in five nodes 128×1536", draft("Mul", draft("Mul", x, draft("Add", inner, one)), halves))
    yield single("Gelu 128×1536", "Gelu", [wide], opset=20)
    yield single("Gelu tanh 128×1536", "Gelu", [wide], opset=20, approximate="tanh")
    draft = Draft()
    x = draft.input(wide)
    yield draft.case("SiLU in two nodes 128×1536", draft("Mul", x, draft("Sigmoid", x)))
    yield single("Add with a row 128×1536", "Add", [wide, (1536,)])
    yield single("Where 128×1536", "Where", [np.random.default_rng(1).random(wide) > 0.5, wide, wide])


def attention() -> Iterator[Case]:
    """Attention, whole and in pieces."""
    yield _attention(128, 384, 12)
    yield _attention(512, 384, 6)
    yield _attention(16, 768, 12)
    yield _encoder(128, 384, 12)
    yield _encoder(16, 384, 12)
    rows, width, heads = 128, 384, 12
    yield single(
        "com.microsoft MultiHeadAttention 128×384",
        "MultiHeadAttention",
        [(1, rows, width)] * 3,
        domain=MICROSOFT,
        num_heads=heads,
    )
    yield single(
        "com.microsoft Attention 128×384",
        "Attention",
        [(1, rows, width)],
        [(width, 3 * width), (3 * width,)],
        domain=MICROSOFT,
        num_heads=heads,
    )
    yield single("Attention 12×128×32", "Attention", [(1, heads, rows, width // heads)] * 3, opset=23)


def _project(draft: Draft, x: str, width: int, columns: int) -> str:
    return str(
        draft(
            "Add", draft("MatMul", x, draft.weight((width, columns))), draft.weight(np.full(columns, 0.1, np.float32))
        )
    )


def _heads(draft: Draft, x: str, rows: int, width: int, heads: int) -> str:
    shape = draft.weight(np.array([1, rows, heads, width // heads]))

    def split(perm: list[int]) -> str:
        return str(draft("Transpose", draft("Reshape", _project(draft, x, width, width), shape), perm=perm))

    scores = draft("MatMul", split([0, 2, 1, 3]), split([0, 2, 3, 1]))
    scores = draft("Div", scores, draft.weight(np.array((width // heads) ** 0.5, np.float32)))
    mixed = draft("MatMul", draft("Softmax", scores), split([0, 2, 1, 3]))
    joined = draft("Reshape", draft("Transpose", mixed, perm=[0, 2, 1, 3]), draft.weight(np.array([1, rows, width])))
    return _project(draft, joined, width, width)


def _attention(rows: int, width: int, heads: int) -> Case:
    draft = Draft()
    x = draft.input((1, rows, width))
    return draft.case(f"self-attention in nodes {rows}×{width}, {heads} heads", _heads(draft, x, rows, width, heads))


def _encoder(rows: int, width: int, heads: int) -> Case:
    draft = Draft()
    x = draft.input((1, rows, width))
    for _ in range(2):
        x = draft("Add", x, _heads(draft, x, rows, width, heads))
        x = draft("LayerNormalization", x, draft.weight((width,)), draft.weight((width,)))
        inner = draft("Gelu", _project(draft, x, width, 4 * width))
        x = draft("Add", x, _project(draft, inner, 4 * width, width))
        x = draft("LayerNormalization", x, draft.weight((width,)), draft.weight((width,)))
    return draft.case(f"two encoder layers {rows}×{width}", x, opset=20)


def recurrent() -> Iterator[Case]:
    """LSTM, GRU, RNN."""
    for operator, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
        for steps, batch, width, hidden, directions in (
            (64, 1, 128, 128, 1),
            (64, 1, 128, 128, 2),
            (1, 1, 128, 128, 1),
            (8, 1, 256, 512, 1),
            (64, 8, 256, 256, 1),
        ):
            if operator == "RNN" and batch * directions > 1:
                continue
            shapes = [
                (directions, gates * hidden, width),
                (directions, gates * hidden, hidden),
                (directions, 2 * gates * hidden),
            ]
            yield single(
                f"{operator} {steps} steps × {batch}, {width} → {hidden}" + (", both ways" if directions == 2 else ""),
                operator,
                [(steps, batch, width)],
                [
                    np.random.default_rng(place).normal(0, 0.1, shape).astype(np.float32)
                    for place, shape in enumerate(shapes)
                ],
                outputs=2,
                hidden_size=hidden,
                direction="bidirectional" if directions == 2 else "forward",
                **({"linear_before_reset": 1} if operator == "GRU" else {}),
            )
    yield _dynamic_lstm()


def _bytes(seed: int, *shape: int, low: int = -127, high: int = 128) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape)


def _dynamic_lstm() -> Case:
    draft = Draft()
    hidden, width = 128, 128
    w, r = (
        draft.weight(_bytes(1, 1, width, 4 * hidden).astype(np.int8)),
        draft.weight(_bytes(2, 1, hidden, 4 * hidden).astype(np.int8)),
    )
    bias = draft.weight(np.zeros((1, 8 * hidden), np.float32))
    scale, zero = draft.weight(np.full((1,), 0.002, np.float32)), draft.weight(np.zeros((1,), np.int8))
    x = draft.input((64, 1, width))
    y = draft(
        "DynamicQuantizeLSTM",
        x,
        w,
        r,
        bias,
        "",
        "",
        "",
        "",
        scale,
        zero,
        scale,
        zero,
        domain=MICROSOFT,
        hidden_size=hidden,
        outputs=3,
    )
    # onnxruntime quantizes the state of each step; a rounding that falls the other way is carried on.
    return draft.case("com.microsoft DynamicQuantizeLSTM 64 steps, 128 → 128", y[0], tolerance=0.05)


def eight_bits() -> Iterator[Case]:
    """8-bit integers."""
    for rows, inner, columns in ((1, 384, 1536), (24, 384, 1536), (128, 384, 1536), (512, 512, 512)):
        yield _dynamic_product(rows, inner, columns)
    for rows in (24, 128):
        x, w = _bytes(1, rows, 384, low=0, high=256).astype(np.uint8), _bytes(2, 384, 1536).astype(np.int8)
        yield single(
            f"MatMulInteger {rows}×384×1536",
            "MatMulInteger",
            [x],
            [w, np.array(128, np.uint8), np.array(0, np.int8)],
            dtype=TensorProto.INT32,
        )
    yield single(
        "DynamicQuantizeLinear 128×384", "DynamicQuantizeLinear", [(128, 384)], outputs=3, dtype=TensorProto.UINT8
    )
    yield _quantized_product(128, 384, 1536)
    yield _quantized_conv("3×3", (64, 64, 3, 3), 1)
    yield _quantized_conv("1×1", (256, 64, 1, 1), 1)
    yield _quantized_conv("depthwise 3×3", (64, 1, 3, 3), 64)
    image = _bytes(1, 1, 64, 56, 56, low=0, high=256).astype(np.uint8)
    kernel = _bytes(2, 64, 64, 3, 3).astype(np.int8)
    zeros = [np.array(128, np.uint8), np.array(0, np.int8)]
    yield single(
        "ConvInteger 3×3: 64, 56×56", "ConvInteger", [image], [kernel, *zeros], pads=[1] * 4, dtype=TensorProto.INT32
    )
    yield _linear_conv()


def _dynamic_product(rows: int, inner: int, columns: int) -> Case:
    """As dynamic quantization makes it of MatMul."""
    draft = Draft()
    x = draft.input((rows, inner))
    quantized, scale, zero = draft("DynamicQuantizeLinear", x, outputs=3)
    w = draft.weight(_bytes(2, inner, columns).astype(np.int8))
    product = draft("MatMulInteger", quantized, w, zero, draft.weight(np.array(0, np.int8)))
    factor = draft("Mul", scale, draft.weight(np.array(0.01, np.float32)))
    y = draft("Mul", draft("Cast", product, to=TensorProto.FLOAT), factor)
    y = draft("Add", y, draft.weight((columns,)))
    return draft.case(f"dynamically quantized product {rows}×{inner}×{columns}", y, tolerance=2e-3)


def _quantize(draft: Draft, x: str, scale: float, *, back: bool = True) -> str:
    args = draft.weight(np.array(scale, np.float32)), draft.weight(np.array(128, np.uint8))
    y = draft("QuantizeLinear", x, *args)
    return str(draft("DequantizeLinear", y, *args) if back else y)


def _quantized_product(rows: int, inner: int, columns: int) -> Case:
    draft = Draft()
    x = _quantize(draft, draft.input((rows, inner)), 0.03)
    scale, zero = draft.weight(np.full(columns, 0.001, np.float32)), draft.weight(np.zeros(columns, np.int8))
    w = draft("DequantizeLinear", draft.weight(_bytes(2, inner, columns).astype(np.int8)), scale, zero, axis=1)
    y = _quantize(draft, draft("MatMul", x, w), 0.1)
    return draft.case(f"QDQ MatMul {rows}×{inner}×{columns}", y, tolerance=0.02)


def _quantized_conv(name: str, shape: tuple[int, ...], group: int) -> Case:
    draft = Draft()
    x = _quantize(draft, draft.input((1, 64, 56, 56)), 0.03)
    scale, zero = draft.weight(np.full(shape[0], 0.002, np.float32)), draft.weight(np.zeros(shape[0], np.int8))
    w = draft("DequantizeLinear", draft.weight(_bytes(2, *shape).astype(np.int8)), scale, zero, axis=0)
    half = shape[2] // 2
    y = draft("Relu", draft("Conv", x, w, pads=[half] * 4, group=group))
    return draft.case(f"QDQ Conv {name}: 64 → {shape[0]}, 56×56", _quantize(draft, y, 0.1), tolerance=0.02)


def _linear_conv() -> Case:
    draft = Draft()
    x = _quantize(draft, draft.input((1, 64, 56, 56)), 0.03, back=False)
    weights = [
        np.array(0.03, np.float32),
        np.array(128, np.uint8),
        _bytes(2, 64, 64, 3, 3).astype(np.int8),
        np.array(0.002, np.float32),
        np.array(0, np.int8),
        np.array(0.1, np.float32),
        np.array(128, np.uint8),
    ]
    y = draft("QLinearConv", x, *map(draft.weight, weights), pads=[1] * 4)
    return draft.case("QLinearConv 3×3: 64, 56×56", y, dtype=TensorProto.UINT8)


def four_bits() -> Iterator[Case]:
    """4-bit weights."""
    for rows in (1, 16, 128):
        yield _four(rows, 1024, 4096)
    draft = Draft()
    values = _bytes(3, 1024, 1024, low=-8, high=8).astype(ml_dtypes.int4)
    scale = draft.weight(np.random.default_rng(4).uniform(0.01, 0.02, (32, 1024)).astype(np.float32))
    w = draft("DequantizeLinear", draft.weight(values), scale, axis=0, block_size=32)
    y = draft("MatMul", draft.input((16, 1024)), w)
    # onnxruntime makes a product with activations in 8 bits of it.
    yield draft.case("DequantizeLinear int4 in blocks of 32, MatMul 16×1024×1024", y, opset=21, tolerance=0.01)


def _four(rows: int, inner: int, columns: int, block: int = 32) -> Case:
    draft = Draft()
    count = inner // block
    packed = np.random.default_rng(1).integers(0, 256, (columns, count, block // 2), dtype=np.uint8)
    scales = np.random.default_rng(2).uniform(0.005, 0.01, columns * count).astype(np.float32)
    y = draft(
        "MatMulNBits",
        draft.input((rows, inner)),
        draft.weight(packed),
        draft.weight(scales),
        domain=MICROSOFT,
        K=inner,
        N=columns,
        bits=4,
        block_size=block,
    )
    return draft.case(f"MatMulNBits {rows}×{inner}×{columns}", y, tolerance=1e-3)


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "products": products,
    "norms": norms,
    "activations": activations,
    "attention": attention,
    "recurrent": recurrent,
    "eight_bits": eight_bits,
    "four_bits": four_bits,
}
