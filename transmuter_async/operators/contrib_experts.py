"""com.microsoft: mixtures of experts — MoE, QMoE, and the router of grouped experts.

A token only needs its `k` experts. The host form runs each expert on its tokens. A program can't have sizes that depend
on the routing: with few tokens it walks over the (token, expert) pairs, each reading one expert's weights; with many it
walks over the experts, each computing all tokens and weighing the unchosen ones with 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter_async.operators.activation import gelu_20
from transmuter_async.operators.context import Context
from transmuter_async.operators.contrib_weights import dequantize_blocks, unpack
from transmuter_async.operators.numeric import narrow, sigmoid, softmax, widen
from transmuter_async.operators.registry import is_host, operator, xp

MICROSOFT = "com.microsoft"


@dataclass(frozen=True, slots=True)
class _Layer:
    """A linear layer of every expert.

    Attributes:
        weights: `(E, N, K)` floats, or `(E, N, K * bits / 8)` bytes.
        bias: `(E, N)` or None.
        scales, zero_points: Of packed weights: `(E, N, blocks)`, already unpacked.
        bits: 0 for plain weights.
    """

    weights: Any
    bias: Any = None
    scales: Any = None
    zero_points: Any = None
    bits: int = 0

    def arrays(self) -> tuple[Any, ...]:
        return self.weights, self.bias, self.scales, self.zero_points

    def apply(self, arrays: tuple[Any, ...], x: Any) -> Any:
        """`x (tokens, K)` through one expert, whose `arrays` have no leading axis."""
        weights, bias, scales, zero_points = arrays
        if self.bits:
            codes = unpack(weights, self.bits)
            block = codes.shape[-1] // scales.shape[-1]
            weights = dequantize_blocks(codes, scales, zero_points, block, 1 << (self.bits - 1))
        m = xp(x, weights)
        y = m.matmul(x, m.swapaxes(widen(weights), 0, 1))
        return y if bias is None else y + widen(bias)


@dataclass(frozen=True, slots=True)
class _Activation:
    name: str
    alpha: float
    beta: float
    limit: float | None
    fusion: int

    def apply(self, hidden: Any, gate: Any) -> Any:
        """What comes between the layers: `hidden` is FC1's result, `gate` FC3's or None."""
        if self.name in ("swiglu", "geglu"):
            if gate is None:
                if self.fusion == 1:
                    hidden, gate = hidden[..., 0::2], hidden[..., 1::2]
                else:
                    half = hidden.shape[-1] // 2
                    hidden, gate = hidden[..., :half], hidden[..., half:]
            m = xp(hidden)
            if self.name == "geglu":
                return gelu_20(hidden, approximate="tanh") * gate
            if self.limit is not None:
                bound = hidden.dtype.type(self.limit)
                hidden, gate = m.minimum(hidden, bound), m.clip(gate, -bound, bound)
            scaled = hidden.dtype.type(self.alpha) * hidden
            return hidden * sigmoid(scaled) * (gate + hidden.dtype.type(self.beta))
        m = xp(hidden)
        match self.name:
            case "relu":
                y = m.maximum(hidden, m.zeros_like(hidden))
            case "relu2":
                y = m.square(m.maximum(hidden, m.zeros_like(hidden)))
            case "gelu":
                y = gelu_20(hidden, approximate="tanh")
            case "silu":
                y = hidden * sigmoid(hidden)
            case "identity":
                y = hidden
            case _:
                raise ValueError(f"activation_type {self.name!r} is not known")
        return y if gate is None else y * gate


def _route(router: Any, weights: Any, k: int, normalize: int) -> tuple[Any, Any]:
    """`(experts, shares)`, both `(tokens, k)`: the k highest of the router's row, and how much each counts.

    The shares are a softmax over all experts, or with `normalize` over the chosen ones; `weights` replaces them.
    """
    m = xp(router, weights)
    logits = widen(router)
    if k < 1 or k > logits.shape[1]:
        raise ValueError(f"k is {k}, but there are {logits.shape[1]} experts")
    if m is np:
        chosen: Any = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    else:
        chosen = lax.top_k(logits, k)[1]
    picked = m.take_along_axis(logits if weights is None else widen(weights), chosen, axis=1)
    if weights is not None:
        if normalize:
            total = picked.sum(1, keepdims=True)
            picked = picked / m.where(total == 0, m.ones_like(total), total)
        return chosen, picked
    if normalize:
        return chosen, softmax(picked)
    return chosen, m.take_along_axis(softmax(logits), chosen, axis=1)


def _mixture(
    x: Any, chosen: Any, shares: Any, fc1: _Layer, fc2: _Layer, fc3: _Layer | None, activation: _Activation
) -> Any:
    """`(tokens, H)`: the shares of the experts' results."""
    arrays = (fc1.arrays(), fc2.arrays(), None if fc3 is None else fc3.arrays())

    def expert(arrays: Any, x: Any) -> Any:
        first, second, third = arrays
        gate = None if fc3 is None else fc3.apply(third, x)
        return fc2.apply(second, activation.apply(fc1.apply(first, x), gate))

    def at(index: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[index], arrays)

    tokens, width, count = x.shape[0], fc2.weights.shape[1], fc1.weights.shape[0]
    flat = jax.tree.leaves(arrays)
    if is_host(x, chosen, *flat):
        result = np.zeros((tokens, width), x.dtype)
        for index in np.unique(chosen):
            rows, place = np.nonzero(chosen == index)
            result[rows] += expert(at(index), x[rows]) * shares[rows, place][:, None]
        return result
    arrays = jax.tree.map(jnp.asarray, arrays)
    x = jnp.asarray(x)
    zero = jnp.zeros((tokens, width), x.dtype)
    if tokens == 0:
        return zero
    if chosen.size <= count:

        def pair(item: Any) -> Any:
            token, index, share = item
            return expert(at(index), x[token][None])[0] * share

        rows = np.repeat(np.arange(tokens), chosen.shape[1])
        each = lax.map(pair, (rows, chosen.reshape(-1), shares.reshape(-1)))
        return each.reshape(tokens, -1, width).sum(1)

    def add(total: Any, item: Any) -> tuple[Any, None]:
        index, arrays = item
        share = jnp.where(chosen == index, shares, jnp.zeros_like(shares)).sum(1, keepdims=True)
        return total + expert(arrays, x) * share, None

    return lax.scan(add, zero, (jnp.arange(count, dtype=chosen.dtype), arrays))[0]


def _rows(input: Any, router: Any) -> Any:
    if input.ndim not in (2, 3):
        raise ValueError(f"input has rank {input.ndim}, but has to be (tokens, hidden) or (batch, tokens, hidden)")
    rows = widen(input).reshape(-1, input.shape[-1])
    if router.shape[0] != rows.shape[0]:
        raise ValueError(f"router_probs has {router.shape[0]} rows for {rows.shape[0]} tokens")
    return rows


@operator("MoE", since_version=1, domain=MICROSOFT, loops=True)
def mo_e_1(
    input: Any,
    router_probs: Any,
    fc1_experts_weights: Any,
    fc1_experts_bias: Any,
    fc2_experts_weights: Any,
    fc2_experts_bias: Any = None,
    fc3_experts_weights: Any = None,
    fc3_experts_bias: Any = None,
    /,
    *,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    activation_type: str = "relu",
    k: int = 1,
    normalize_routing_weights: int = 0,
    swiglu_fusion: int = 0,
    swiglu_limit: float | None = None,
    swiglu_limit_after_activation: int = 0,
    use_sparse_mixer: int = 0,
    context: Context,
) -> Any:
    """Mixture of experts with float weights. `use_sparse_mixer`, a routing of CUDA kernels, is refused."""
    if use_sparse_mixer or swiglu_limit_after_activation:
        raise context.error("use_sparse_mixer and swiglu_limit_after_activation exist in CUDA kernels only")
    x = _rows(input, router_probs)
    chosen, shares = _route(router_probs, None, k, normalize_routing_weights)
    y = _mixture(
        x,
        chosen,
        shares.astype(x.dtype),
        _Layer(fc1_experts_weights, fc1_experts_bias),
        _Layer(fc2_experts_weights, fc2_experts_bias),
        None if fc3_experts_weights is None else _Layer(fc3_experts_weights, fc3_experts_bias),
        _Activation(activation_type, activation_alpha, activation_beta, swiglu_limit, swiglu_fusion),
    )
    return narrow(y.reshape(input.shape), input.dtype)


def _packed(weights: Any, scales: Any, bias: Any, zero_points: Any, bits: int) -> _Layer:
    if bits not in (2, 3, 4, 8):
        raise ValueError(f"experts of {bits} bits are not known; 2, 3, 4 and 8 are")
    if scales is None:
        raise ValueError("packed expert weights need their scales")
    wide = widen(scales)
    per_row = wide.ndim == 2
    wide = wide[..., None] if per_row else wide
    zero = zero_points
    if zero is not None:
        if per_row:
            zero = unpack(zero, bits)[:, : weights.shape[1], None]
        else:
            zero = unpack(zero, bits)[..., : wide.shape[-1]]
    return _Layer(weights, bias, wide, zero, bits)


@operator("QMoE", since_version=1, domain=MICROSOFT, loops=True)
def q_mo_e_1(
    input: Any,
    router_probs: Any,
    fc1_experts_weights: Any,
    fc1_scales: Any,
    fc1_experts_bias: Any,
    fc2_experts_weights: Any,
    fc2_scales: Any = None,
    fc2_experts_bias: Any = None,
    fc3_experts_weights: Any = None,
    fc3_scales: Any = None,
    fc3_experts_bias: Any = None,
    fc1_zero_points: Any = None,
    fc2_zero_points: Any = None,
    fc3_zero_points: Any = None,
    router_weights: Any = None,
    fc1_global_scale: Any = None,
    fc2_global_scale: Any = None,
    fc1_act_scale: Any = None,
    fc2_act_scale: Any = None,
    fc1_act_block_scale: Any = None,
    fc2_act_block_scale: Any = None,
    /,
    *,
    accuracy_level: int = 0,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    activation_type: str = "relu",
    block_size: int | None = None,
    expert_weight_bits: int = 4,
    fc1_expert_weight_bits: int | None = None,
    fc2_expert_weight_bits: int | None = None,
    fc3_expert_weight_bits: int | None = None,
    k: int = 1,
    normalize_routing_weights: int = 0,
    quant_type: str = "int",
    swiglu_fusion: int = 0,
    swiglu_limit: float | None = None,
    swiglu_limit_after_activation: int = 0,
    use_sparse_mixer: int = 0,
    weights_prepacked: int = -1,
    context: Context,
) -> Any:
    """Mixture of experts with packed integer weights, one scale for a row or for each block of it.

    Without `router_weights` the shares of the chosen experts always sum to 1, whatever `normalize_routing_weights` says:
    so onnxruntime's CPU kernel has it.

    The float4 and float8 forms (`quant_type`) and prepacked layouts belong to CUDA kernels and are refused.
    `accuracy_level` is not made use of: activations are not quantised.
    """
    if quant_type != "int":
        raise context.error(f"quant_type {quant_type!r} is not supported; 'int' is")
    if use_sparse_mixer or swiglu_limit_after_activation or weights_prepacked == 1:
        raise context.error(
            "use_sparse_mixer, swiglu_limit_after_activation and weights_prepacked=1 exist in CUDA kernels only"
        )
    x = _rows(input, router_probs)
    chosen, shares = _route(
        router_probs, router_weights, k, normalize_routing_weights if router_weights is not None else 1
    )
    bits = expert_weight_bits
    fc3 = None
    if fc3_experts_weights is not None:
        fc3 = _packed(
            fc3_experts_weights, fc3_scales, fc3_experts_bias, fc3_zero_points, fc3_expert_weight_bits or bits
        )
    y = _mixture(
        x,
        chosen,
        shares.astype(x.dtype),
        _packed(fc1_experts_weights, fc1_scales, fc1_experts_bias, fc1_zero_points, fc1_expert_weight_bits or bits),
        _packed(fc2_experts_weights, fc2_scales, fc2_experts_bias, fc2_zero_points, fc2_expert_weight_bits or bits),
        fc3,
        _Activation(activation_type, activation_alpha, activation_beta, swiglu_limit, swiglu_fusion),
    )
    return narrow(y.reshape(input.shape), input.dtype)


@operator("MoEGroupRouter", since_version=1, domain=MICROSOFT)
def mo_e_group_router_1(
    logits: Any,
    expert_bias: Any,
    projection_weight: Any = None,
    /,
    *,
    group_topk: int = 2,
    n_group: int = 1,
    router_sentinel: float = -10000.0,
    top_k: int,
    topk_group: int = 1,
    n_outputs: int,
) -> tuple[Any, Any, Any]:
    """Routing of DeepSeek-V3: the best experts of the best groups, by biased sigmoid scores.

    The first output holds the logarithm of the (unbiased) scores of the chosen experts and `router_sentinel` elsewhere;
    the other two the biased and unbiased scores of all.
    """
    m = xp(logits, expert_bias, projection_weight)
    rows = widen(logits).reshape(-1, logits.shape[-1])
    if projection_weight is not None:
        rows = m.matmul(rows, m.swapaxes(widen(projection_weight), 0, 1))
    tokens, experts = rows.shape
    if n_group < 1 or experts % n_group:
        raise ValueError(f"{experts} experts do not fall into {n_group} groups")
    score = sigmoid(rows)
    biased = score + expert_bias
    size = experts // n_group
    grouped = biased.reshape(tokens, n_group, size)
    strength = m.sort(grouped, axis=-1)[..., size - min(group_topk, size) :].sum(-1)
    best = _highest(strength, min(topk_group, n_group))
    open_ = m.broadcast_to(best[..., None], grouped.shape).reshape(tokens, experts)
    chosen = _highest(m.where(open_, biased, np.float32(-np.inf)), min(top_k, experts)) & open_
    routed = m.where(chosen, m.log(m.maximum(score, np.float32(1e-20))), np.float32(router_sentinel))
    return narrow(routed, logits.dtype), biased, score


def _highest(values: Any, count: int) -> Any:
    """Which `count` entries of each row are the highest, the first of equal ones first."""
    m = xp(values)
    if m is np:
        order: Any = np.argsort(-values, axis=-1, kind="stable")[..., :count]
    else:
        order = lax.top_k(values, count)[1]
    return (order[..., None] == np.arange(values.shape[-1], dtype=order.dtype)).any(-2)
