"""com.microsoft and ai.onnx.ml: attributes and inputs that the other examples leave at their defaults, against onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.operators.cases import EXACT, FLOAT, Case, Draw, Tolerance, check, examples, few_examples
from tests.operators.oracle import MICROSOFT, ML, onnxruntime_outputs

CASES: dict[str, tuple[str, str, Callable[[Draw], Case], Tolerance]] = {}

LEVEL = Tolerance(0, 1, "a value between two levels may go to either: scales are folded in another order")
GATES = Tolerance(2e-3, 2e-3, "onnxruntime approximates sigmoid and tanh")


def case(tolerance: Tolerance, domain: str = MICROSOFT) -> Callable[[Callable[[Draw], Case]], Callable[[Draw], Case]]:
    def register(function: Callable[[Draw], Case]) -> Callable[[Draw], Case]:
        name, _, _ = function.__name__.partition("_")
        CASES[function.__name__] = (name, domain, function, tolerance)
        return function

    return register


def _byte(d: Draw) -> Any:
    return d.pick((np.uint8, np.int8))


def _scale(d: Draw) -> np.ndarray:
    return np.asarray(d.pick((0.02, 0.1)), np.float32)


def _zero(d: Draw, dtype: Any) -> np.ndarray:
    return np.asarray(d.codes(dtype))


def _geometry(d: Draw, sizes: tuple[int, int], kernel: tuple[int, int], *, dilated: bool = True) -> dict[str, Any]:
    """Strides, dilations and padding of a 2-D window that fits into the sizes."""
    steps = [d.size(1, 2) if dilated else 1 for _ in kernel]
    steps = [step if (k - 1) * step + 1 <= size else 1 for k, step, size in zip(kernel, steps, sizes, strict=True)]
    attributes: dict[str, Any] = {"strides": [d.size(1, 3), d.size(1, 3)], "kernel_shape": list(kernel)}
    if dilated:
        attributes["dilations"] = steps
    kind = d.pick(("pads", "pads", "SAME_UPPER", "SAME_LOWER", "VALID"))
    if kind == "pads":
        attributes["pads"] = [d.size(0, min(2, k - 1)) for k in (*kernel, *kernel)]
    else:
        attributes["auto_pad"] = kind
        if kind != "VALID" and dilated:  # onnxruntime refuses both together
            attributes["dilations"] = [1, 1]
    return attributes


# --- windows ----------------------------------------------------------------------------------------------------------


@case(FLOAT)
def FusedConv_geometry(d: Draw) -> Case:
    group, per, filters = d.pick(((1, 2, 3), (2, 1, 4), (1, 1, 1)))
    sizes, kernel = (d.size(3, 7), d.size(3, 7)), (d.size(1, 3), d.size(1, 3))
    attributes = {"group": group, "activation": d.pick(("Relu", "Tanh")), **_geometry(d, sizes, kernel)}
    inputs = [
        d.floats(d.size(1, 2), group * per, *sizes),
        d.floats(filters, per, *kernel),
        d.floats(filters) if d.flag() else None,
    ]
    return Case(inputs, attributes)


@case(LEVEL)
def QLinearConv_geometry(d: Draw) -> Case:
    dtype = _byte(d)
    right = np.int8 if dtype == np.int8 else _byte(d)
    group, per, filters = d.pick(((1, 2, 3), (2, 1, 4)))
    sizes, kernel = (d.size(3, 6), d.size(3, 6)), (d.size(1, 3), d.size(1, 3))
    inputs = [
        d.codes(dtype, d.size(1, 2), group * per, *sizes),
        _scale(d),
        _zero(d, dtype),
        d.codes(right, filters, per, *kernel),
        d.positive(filters, scale=0.1) if d.flag() else _scale(d),
        _zero(d, right),
        np.asarray(0.5, np.float32),
        _zero(d, dtype),
        d.integers(-100, 100, filters, dtype=np.int32) if d.flag() else None,
    ]
    if inputs[4].ndim:
        inputs[5] = np.full(filters, inputs[5])
    return Case(inputs, {"group": group, **_geometry(d, sizes, kernel)}, constant=(3, 4, 5))


@case(FLOAT)
def ConvTransposeWithDynamicPads_geometry(d: Draw) -> Case:
    group, per = d.pick(((1, 2), (2, 1), (2, 2)))
    kernel, strides = (d.size(2, 3), d.size(2, 3)), [d.size(1, 3), d.size(1, 3)]
    attributes = {
        "group": group,
        "strides": strides,
        "dilations": [d.size(1, 2), d.size(1, 2)],
        "kernel_shape": list(kernel),
        "output_padding": [d.size(0, s - 1) for s in strides],
    }
    inputs = [
        d.floats(d.size(1, 2), 2 * group, d.size(2, 4), d.size(2, 4)),
        d.floats(2 * group, per, *kernel),
        d.integers(0, 2, 4),
        d.floats(group * per) if d.flag() else None,
    ]
    return Case(inputs, attributes)


@case(EXACT)
def NhwcMaxPool_geometry(d: Draw) -> Case:
    sizes, kernel = (d.size(3, 7), d.size(3, 7)), (d.size(1, 3), d.size(1, 3))
    attributes = _geometry(d, sizes, kernel)
    if "auto_pad" not in attributes:
        attributes["ceil_mode"] = int(d.flag())
    return Case([d.codes(_byte(d), d.size(1, 2), *sizes, d.size(1, 3))], attributes)


@case(LEVEL)
def QLinearAveragePool_auto_pad(d: Draw) -> Case:
    sizes, kernel = (d.size(3, 7), d.size(3, 7)), (d.size(1, 3), d.size(1, 3))
    dtype = _byte(d)
    attributes = {"count_include_pad": int(d.flag()), **_geometry(d, sizes, kernel, dilated=False)}
    x = d.codes(dtype, d.size(1, 2), d.size(1, 3), *sizes)
    return Case([x, _scale(d), _zero(d, dtype), _scale(d), _zero(d, dtype)], attributes)


# --- axes -------------------------------------------------------------------------------------------------------------


@case(EXACT)
def QLinearConcat_axis(d: Draw) -> Case:
    dtype, rank = _byte(d), d.size(1, 3)
    axis = d.size(-rank, rank - 1)
    inputs: list[Any] = [_scale(d), _zero(d, dtype)]
    shape = list(d.shape(rank, low=1))
    for _ in range(d.size(1, 3)):
        shape[axis] = d.size(1, 3)
        inputs += [d.codes(dtype, *shape), _scale(d), _zero(d, dtype)]
    return Case(inputs, {"axis": axis})


@case(EXACT)
def QuantizeLinear_axis(d: Draw) -> Case:
    dtype, rank = d.pick((np.int8, np.uint8, np.int16, np.uint16)), d.size(1, 3)
    axis, x = d.size(-rank, rank - 1), d.floats(*d.shape(rank, low=1))
    return Case([x, d.positive(x.shape[axis], scale=0.1), d.codes(dtype, x.shape[axis])], {"axis": axis})


@case(EXACT)
def DequantizeLinear_axis(d: Draw) -> Case:
    dtype, rank = d.pick((np.int8, np.uint8, np.int16, np.uint16)), d.size(1, 3)
    axis, x = d.size(-rank, rank - 1), d.codes(dtype, *d.shape(rank, low=1))
    return Case([x, d.positive(x.shape[axis], scale=0.1), d.codes(dtype, x.shape[axis])], {"axis": axis})


@case(EXACT)
def GatherBlockQuantized_axes(d: Draw) -> Case:
    block, rank = d.pick((16, 32)), d.size(2, 3)
    shape = [d.size(1, 4) for _ in range(rank)]
    quantized = d.size(0, rank - 1)
    shape[quantized] = block * d.size(1, 2)
    gathered = d.pick([axis for axis in range(rank) if axis != quantized])
    size = shape[gathered]
    index = d.integers(-size, size, *d.shape(d.size(0, 2), low=1)).astype(d.pick((np.int32, np.int64)))
    scales = list(shape)
    scales[quantized] //= block
    dtype = d.pick((ml_dtypes.int4, ml_dtypes.uint4))
    zeros = d.integers(0, 8, *scales).astype(dtype) if d.flag() else None
    inputs = [d.integers(0, 8, *shape).astype(dtype), index, d.floats(*scales), zeros]
    attributes = {
        "block_size": block,
        "gather_axis": gathered - (rank if d.flag() else 0),
        "quantize_axis": quantized - (rank if d.flag() else 0),
    }
    return Case(inputs, attributes, constant=(0, 2, 3) if zeros is not None else (0, 2))


# --- attention --------------------------------------------------------------------------------------------------------


@case(FLOAT)
def GroupQueryAttention_options(d: Draw) -> Case:
    """Positions that are given, a softmax with one more term, and past and present of one size."""
    groups, each, size, batch = d.size(1, 2), d.size(1, 2), 16, d.size(1, 3)
    heads, length = groups * each, d.size(1, 4)
    prompt = d.flag()
    before = 0 if prompt else d.size(1, 3)
    total = before + length
    attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": groups, "smooth_softmax": d.pick((-1, 0, 1))}
    rotary = d.flag()
    if rotary:
        attributes |= {"do_rotary": 1, "rotary_interleaved": int(d.flag())}
    inputs = [
        d.floats(batch, length, heads * size),
        d.floats(batch, length, groups * size),
        d.floats(batch, length, groups * size),
        d.floats(batch, groups, before, size),
        d.floats(batch, groups, before, size),
        np.full(batch, total - 1, np.int32),
        np.asarray(total, np.int32),
        d.floats(32, 8) if rotary else None,
        d.floats(32, 8) if rotary else None,
        d.integers(0, 28, batch, length) if rotary and d.flag() else None,
    ]
    if not prompt and length > 1:  # onnxruntime takes one row where there is a past and more than one token
        inputs = [
            value[:1] if isinstance(value, np.ndarray) and value.ndim and k not in (7, 8) else value
            for k, value in enumerate(inputs)
        ]
    return Case(inputs, attributes, outputs=3, static=(6,))


@case(FLOAT)
def GroupQueryAttention_quantized(d: Draw) -> Case:
    """A cache of 8 or 4 bits, also one that is still empty; in both directions or, of one step, in one."""
    groups, each, size, batch = d.size(1, 2), d.size(1, 2), 16, d.size(1, 3)
    heads, before = groups * each, d.size(0, 3)
    length = 1 if before else d.size(1, 4)
    total, bits = before + length, d.pick((4, 8))
    kind = d.pick(("PER_TENSOR", "PER_CHANNEL"))
    dtype, width = (np.int8, size) if bits == 8 else (np.uint8, size // 2)
    scales = [d.positive(1 if kind == "PER_TENSOR" else groups * size, scale=0.05) for _ in range(2)]
    attributes = {
        "num_heads": heads,
        "kv_num_heads": groups,
        "k_quant_type": kind,
        "v_quant_type": kind,
        "kv_cache_bit_width": bits,
    }
    inputs = [
        d.floats(batch, length, heads * size),
        d.floats(batch, length, groups * size),
        d.floats(batch, length, groups * size),
        d.codes(dtype, batch, groups, before, width),
        d.codes(dtype, batch, groups, before, width),
        np.full(batch, total - 1, np.int32),
        np.asarray(total, np.int32),
        *(None for _ in range(5)),
        *scales,
    ]
    return Case(inputs, attributes, outputs=3, static=(6,))


@case(FLOAT)
def GroupQueryAttention_bidirectional(d: Draw) -> Case:
    groups, each, size, batch, length = d.size(1, 2), d.size(1, 2), 16, d.size(1, 3), d.size(1, 4)
    inputs = [
        d.floats(batch, length, groups * each * size),
        d.floats(batch, length, groups * size),
        d.floats(batch, length, groups * size),
        d.floats(batch, groups, 0, size),
        d.floats(batch, groups, 0, size),
        np.full(batch, length - 1, np.int32),
        np.asarray(length, np.int32),
    ]
    attributes = {"num_heads": groups * each, "kv_num_heads": groups, "causal": d.size(0, 1)}
    return Case(inputs, attributes, outputs=3, static=(6,))


def _normed(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    """RMS norm of each head, in float64."""
    rows = x.reshape(*x.shape[:2], -1, len(weight)).astype(np.float64)
    y = rows / np.sqrt((rows * rows).mean(-1, keepdims=True) + epsilon) * weight
    return y.reshape(x.shape).astype(np.float32)


@case(FLOAT)
def GroupQueryAttention_norms(d: Draw) -> Case:
    """onnxruntime's CPU kernel has no norms of query and key: it is given what they make of them."""
    groups, each, size, batch, length = d.size(1, 2), d.size(1, 2), 16, d.size(1, 3), d.size(1, 4)
    heads, before = groups * each, 0
    inputs: list[Any] = [
        d.floats(batch, length, heads * size),
        d.floats(batch, length, groups * size),
        d.floats(batch, length, groups * size),
        d.floats(batch, groups, before, size),
        d.floats(batch, groups, before, size),
        np.full(batch, length - 1, np.int32),
        np.asarray(length, np.int32),
    ]
    weights = [d.floats(size), d.floats(size)]
    plain = {"num_heads": heads, "kv_num_heads": groups}
    epsilon = d.pick((1e-6, 0.1))
    attributes: dict[str, Any] = plain | {"qk_norm_epsilon": epsilon}
    first = second = epsilon
    if d.flag():
        first, second = 0.3, 0.02
        attributes |= {"q_norm_epsilon": first, "k_norm_epsilon": second}
    ready = [_normed(inputs[0], weights[0], first), _normed(inputs[1], weights[1], second), *inputs[2:]]
    expected = onnxruntime_outputs("GroupQueryAttention", ready, plain, outputs=3)
    more = [None] * 7
    return Case([*inputs, *more, *weights], attributes, outputs=3, static=(6,), expected=expected)


@case(FLOAT)
def RotaryEmbedding_scale(d: Draw) -> Case:
    batch, length, heads, half = d.size(1, 3), d.size(1, 4), d.size(1, 3), d.size(1, 3)
    x = d.floats(batch, length, heads * 2 * half)
    attributes = {"interleaved": int(d.flag()), "scale": d.pick((1.0, 0.5)), "num_heads": d.pick((0, heads))}
    if attributes["num_heads"] == 0 and heads > 1:
        attributes["num_heads"] = 0
    return Case([x, d.integers(0, 9, batch, length), d.floats(9, half), d.floats(9, half)], attributes)


# --- gates ------------------------------------------------------------------------------------------------------------

GATE = (("Sigmoid", None, None), ("HardSigmoid", 0.3, 0.6), ("Relu", None, None))
CELL = (("Tanh", None, None), ("Relu", None, None), ("Softsign", None, None), ("LeakyRelu", 0.1, None))


def _activations(d: Draw, count: int) -> dict[str, Any]:
    chosen = [d.pick(options) for _ in range(count) for options in (GATE, CELL, CELL)]
    attributes: dict[str, Any] = {"activations": [name for name, _, _ in chosen]}
    # onnxruntime takes the values in order, only for those that want one.
    if any(alpha is not None for _, alpha, _ in chosen):
        attributes["activation_alpha"] = [alpha for _, alpha, _ in chosen if alpha is not None]
    if any(beta is not None for _, _, beta in chosen):
        attributes["activation_beta"] = [beta for _, _, beta in chosen if beta is not None]
    return attributes


@case(GATES)
def AttnLSTM_activations(d: Draw) -> Case:
    count = d.size(1, 2)
    time, batch, width, hidden = d.size(1, 3), d.size(1, 2), d.size(1, 3), d.size(1, 3)
    steps, depth, size = d.size(1, 3), d.size(1, 3), d.size(1, 3)
    inputs = [
        d.floats(time, batch, width),
        d.floats(count, 4 * hidden, width + depth, scale=0.5),
        d.floats(count, 4 * hidden, hidden, scale=0.5),
        d.floats(count, 8 * hidden),
        None,
        None,
        None,
        None,
        d.floats(count, hidden, size),
        d.floats(count, depth, size),
        d.floats(count, size),
        d.floats(batch, steps, depth),
        d.integers(1, steps + 1, batch, dtype=np.int32),
        None,
    ]
    attributes = {
        "direction": "bidirectional" if count == 2 else "forward",
        "hidden_size": hidden,
        "input_forget": int(d.flag()),
        "clip": d.pick((None, 1.5)),
        **_activations(d, count),
    }
    return Case(inputs, attributes, outputs=3)


@case(FLOAT)
def FusedGemm_parameters(d: Draw) -> Case:
    name, params = d.pick(
        (("HardSigmoid", (0.3, 0.4)), ("ThresholdedRelu", (0.5,)), ("LeakyRelu", (0.3,)), ("Elu", (0.7,)))
    )
    attributes = {"activation": name, "alpha": d.pick((1.0, 0.25)), "activation_alpha": params[0]}
    if len(params) > 1:
        attributes["activation_beta"] = params[1]
    rows, inner, columns = d.size(1, 4), d.size(1, 4), d.size(1, 4)
    return Case([d.floats(rows, inner), d.floats(inner, columns), d.floats(columns) if d.flag() else None], attributes)


@case(FLOAT)
def MatMulBnb4_transB(d: Draw) -> Case:
    inner, columns, block = d.pick((16, 32, 48)), d.size(1, 4), d.pick((16, 32))
    total = inner * columns
    inputs = [d.floats(d.size(1, 3), inner), d.codes(np.uint8, (total + 1) // 2), d.positive(-(-total // block))]
    attributes = {
        "K": inner,
        "N": columns,
        "block_size": block,
        "quant_type": d.pick((0, 1)),
        "training_mode": int(d.flag()),
    }
    return Case(inputs, attributes, constant=(1, 2))


# --- ai.onnx.ml -------------------------------------------------------------------------------------------------------


@case(EXACT, ML)
def LabelEncoder_defaults(d: Draw) -> Case:
    """Version 4: keys and values as tensors, and a default for what is not among them."""
    dtype, other = d.pick(
        ((np.int64, np.int64), (np.int64, np.float32), (np.float32, np.int64), (np.float64, np.float64))
    )
    keys = d.rng.permutation(9)[: d.size(1, 5)].astype(dtype)
    values = d.integers(-9, 9, len(keys)).astype(other)
    attributes = {"keys_tensor": keys, "values_tensor": values, "default_tensor": np.asarray([77], other)}
    return Case([d.integers(0, 9, *d.shape(d.size(1, 2))).astype(dtype)], attributes, opset=4)


@case(EXACT, ML)
def LabelEncoder_default(d: Draw) -> Case:
    value = d.pick(("string", "int64", "float"))
    keys = [int(key) for key in d.rng.permutation(9)[: d.size(1, 5)]]
    attributes: dict[str, Any] = {"keys_int64s": keys}
    if value == "string":
        attributes |= {"values_strings": [f"v{key}" for key in keys], "default_string": "none"}
    elif value == "int64":
        attributes |= {"values_int64s": [key * 7 for key in keys], "default_int64": -5}
    else:
        attributes |= {"values_floats": [key / 4 for key in keys], "default_float": -0.5}
    x = d.integers(0, 9, *d.shape(d.size(1, 2)))
    return Case([x], attributes, opset=d.pick((2, 4)), traced=value != "string")


@case(EXACT, ML)
def OneHotEncoder_zeros(d: Draw) -> Case:
    x = d.rng.choice(np.asarray([3, 1, 4]), d.shape(d.size(1, 2), low=1)).astype(d.pick((np.int64, np.float32)))
    return Case([x], {"cats_int64s": [3, 1, 4], "zeros": d.size(0, 1)})


@case(FLOAT, ML)
def SVMClassifier_labels(d: Draw) -> Case:
    rows, columns, classes = d.size(1, 4), d.size(1, 3), d.size(2, 4)
    each = [d.size(1, 3) for _ in range(classes)]
    attributes = {
        "kernel_type": d.pick(("LINEAR", "RBF")),
        "kernel_params": [0.5, 0.0, 0.0],
        "vectors_per_class": each,
        "support_vectors": d.list(sum(each) * columns),
        "coefficients": d.list((classes - 1) * sum(each)),
        "rho": d.list(classes * (classes - 1) // 2),
        "classlabels_strings": ["one", "two", "three", "four"][:classes],
        "post_transform": d.pick(("NONE", "LOGISTIC", "SOFTMAX")),
    }
    return Case([d.floats(rows, columns)], attributes, outputs=2, traced=False)


@case(FLOAT, ML)
def TreeEnsembleRegressor_tensors(d: Draw) -> Case:
    """Version 3: thresholds, weights and base values as tensors of doubles."""
    features, targets, trees = d.size(1, 3), d.size(1, 2), d.size(1, 3)
    columns: dict[str, list[Any]] = {
        name: [] for name in ("treeids", "nodeids", "featureids", "modes", "true", "false", "missing")
    }
    values: list[float] = []
    weights: list[tuple[int, int, int, float]] = []
    for tree in range(trees):
        deep = d.flag()
        for node in range(5 if deep else 3):
            leaf = not (node == 0 or (deep and node == 2))
            columns["treeids"].append(tree)
            columns["nodeids"].append(node)
            columns["featureids"].append(0 if leaf else int(d.rng.integers(features)))
            columns["modes"].append("LEAF" if leaf else d.pick(("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT")))
            columns["true"].append(0 if leaf else node + 1)
            columns["false"].append(0 if leaf else node + 2)
            columns["missing"].append(0 if leaf else int(d.flag()))
            values.append(0.0 if leaf else float(np.round(d.rng.normal(), 2)))
            if leaf:  # onnxruntime leaves the base value out of a target that no leaf tells anything about
                weights.extend((tree, node, target, float(d.rng.normal())) for target in range(targets))
    if any(
        count == 5 for count in np.bincount(columns["treeids"])
    ):  # the second split of a deep tree has its own leaves
        for k, node in enumerate(columns["nodeids"]):
            if node == 2 and columns["modes"][k] != "LEAF":
                columns["true"][k], columns["false"][k] = 3, 4
    attributes = {
        "nodes_treeids": columns["treeids"],
        "nodes_nodeids": columns["nodeids"],
        "nodes_featureids": columns["featureids"],
        "nodes_modes": columns["modes"],
        "nodes_truenodeids": columns["true"],
        "nodes_falsenodeids": columns["false"],
        "nodes_missing_value_tracks_true": columns["missing"],
        "nodes_hitrates_as_tensor": np.ones(len(values)),
        "nodes_values_as_tensor": np.asarray(values),
        "target_treeids": [w[0] for w in weights],
        "target_nodeids": [w[1] for w in weights],
        "target_ids": [w[2] for w in weights],
        "target_weights_as_tensor": np.asarray([w[3] for w in weights]),
        "n_targets": targets,
        "base_values_as_tensor": d.floats(targets, dtype=np.float64) if d.flag() else None,
        "aggregate_function": d.pick(("SUM", "AVERAGE", "MIN", "MAX")),
    }
    x = np.round(d.floats(d.size(1, 5), features, dtype=np.float64), 1)
    if d.flag():
        x[0, 0] = np.nan
    return Case([x], attributes, opset=3)


@pytest.mark.parametrize("name", CASES)
@examples
@given(data=st.data())
def test_equals_onnxruntime(name: str, data: st.DataObject) -> None:
    op, domain, make, tolerance = CASES[name]
    check(op, make(Draw(data)), tolerance, domain=domain)


HOST = ("SVMClassifier_labels",)
"""Labels that are strings live on the host."""


@pytest.mark.parametrize("name", [name for name in CASES if name not in HOST])
@few_examples
@given(data=st.data())
def test_program_equals_onnxruntime(name: str, data: st.DataObject) -> None:
    op, domain, make, tolerance = CASES[name]
    check(op, make(Draw(data)), tolerance, domain=domain, traced=True)
