"""Tiny decoders and encoders for com.microsoft's text generation, in the interfaces of onnxruntime's converter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

I32, F32 = TensorProto.INT32, TensorProto.FLOAT
MICROSOFT = "com.microsoft"
MELS = 4
"""Features of one frame of audio."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a decoder. The last two tokens end an answer and pad it."""

    vocabulary: int = 13
    heads: int = 2
    size: int = 3
    layers: int = 2

    @property
    def hidden(self) -> int:
        return self.heads * self.size

    @property
    def eos(self) -> int:
        return self.vocabulary - 2

    @property
    def pad(self) -> int:
        return self.vocabulary - 1


def weights(rng: np.random.Generator, **shapes: tuple[int, ...]) -> list[onnx.TensorProto]:
    return [numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name) for name, shape in shapes.items()]


def value(name: str, dtype: int, shape: list[Any] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def decoder_only(seed: int, sizes: Sizes | None = None) -> onnx.GraphProto:
    """GPT-2's interface: embeddings, Attention nodes with a past, logits."""
    sizes = sizes or Sizes()
    rng = np.random.default_rng(seed)
    inputs = [
        value("input_ids", I32, ["b", "s"]),
        value("position_ids", I32, ["b", "s"]),
        value("attention_mask", I32, ["b", "t"]),
    ]
    outputs = [value("logits", F32, ["b", "s", sizes.vocabulary])]
    made = weights(
        rng, words=(sizes.vocabulary, sizes.hidden), places=(32, sizes.hidden), head=(sizes.hidden, sizes.vocabulary)
    )
    nodes = [
        helper.make_node("Gather", ["words", "input_ids"], ["w"]),
        helper.make_node("Gather", ["places", "position_ids"], ["p"]),
        helper.make_node("Add", ["w", "p"], ["x0"]),
    ]
    for layer in range(sizes.layers):
        made += weights(rng, **{f"qkv{layer}": (sizes.hidden, 3 * sizes.hidden), f"bias{layer}": (3 * sizes.hidden,)})
        inputs.append(value(f"past_{layer}", F32, [2, "b", sizes.heads, "past", sizes.size]))
        outputs.append(value(f"present_{layer}", F32, [2, "b", sizes.heads, "t", sizes.size]))
        nodes += [
            helper.make_node(
                "Attention",
                [f"x{layer}", f"qkv{layer}", f"bias{layer}", "attention_mask", f"past_{layer}"],
                [f"a{layer}", f"present_{layer}"],
                domain=MICROSOFT,
                num_heads=sizes.heads,
                unidirectional=1,
            ),
            helper.make_node("Add", [f"x{layer}", f"a{layer}"], [f"x{layer + 1}"]),
        ]
    nodes.append(helper.make_node("MatMul", [f"x{sizes.layers}", "head"], ["logits"]))
    return helper.make_graph(nodes, "decoder", inputs, outputs, made)


def _split(source: str, made: list[tuple[str, str]]) -> list[onnx.NodeProto]:
    """`source` times a weight, by head: a key or value cache."""
    return [
        node
        for name, weight in made
        for node in (
            helper.make_node("MatMul", [source, weight], [f"{name}_3"]),
            helper.make_node("Reshape", [f"{name}_3", "by_head"], [f"{name}_4"]),
            helper.make_node("Transpose", [f"{name}_4"], [name], perm=[0, 2, 1, 3]),
        )
    ]


def _by_head(sizes: Sizes) -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["by_head"], value_ints=[0, 0, sizes.heads, sizes.size])


PAST = [f"past_{kind}_{part}_0" for part in ("self", "cross") for kind in ("key", "value")]


def _cross_decoder(
    rng: np.random.Generator, sizes: Sizes, tokens: Any, mask: bool, made: list[onnx.TensorProto]
) -> onnx.GraphProto:
    """One layer of self and of cross attention."""
    fixed = [value("encoder_attention_mask", I32, ["b", "s"])] if mask else []
    return helper.make_graph(
        [
            helper.make_node("Gather", ["words", "input_ids"], ["x"]),
            helper.make_node("MatMul", ["x", "wqkv"], ["qkv"]),
            helper.make_node("Split", ["qkv"], ["q", "k", "v"], axis=2, num_outputs=3),
            helper.make_node(
                "MultiHeadAttention",
                ["q", "k", "v", "", "", "", *PAST[:2]],
                ["a", "present_key_self_0", "present_value_self_0"],
                domain=MICROSOFT,
                num_heads=sizes.heads,
            ),
            helper.make_node("Add", ["x", "a"], ["y"]),
            helper.make_node("MatMul", ["y", "wq"], ["cq"]),
            helper.make_node(
                "MultiHeadAttention",
                ["cq", *PAST[2:], *(["", "encoder_attention_mask"] if mask else [])],
                ["c"],
                domain=MICROSOFT,
                num_heads=sizes.heads,
            ),
            helper.make_node("Add", ["y", "c"], ["z"]),
            helper.make_node("MatMul", ["z", "head"], ["logits"]),
        ],
        "decoder",
        [
            value("input_ids", I32, ["b", tokens]),
            *fixed,
            *(value(name, F32, ["b", sizes.heads, "t", sizes.size]) for name in PAST),
        ],
        [
            value("logits", F32, ["b", "n", sizes.vocabulary]),
            *(value(f"present_{kind}_self_0", F32, ["b", sizes.heads, "u", sizes.size]) for kind in ("key", "value")),
        ],
        made
        + weights(
            rng,
            wqkv=(sizes.hidden, 3 * sizes.hidden),
            wq=(sizes.hidden, sizes.hidden),
            head=(sizes.hidden, sizes.vocabulary),
        ),
    )


CROSS = [("present_key_cross_0", "wk"), ("present_value_cross_0", "wv")]


def encoder_decoder(seed: int, tokens: Any = 1, sizes: Sizes | None = None) -> tuple[onnx.GraphProto, onnx.GraphProto]:
    """T5's interface: the encoder gives the keys and values of cross attention, the decoder attends to them and to itself."""
    sizes = sizes or Sizes()
    rng = np.random.default_rng(seed)
    shared = weights(rng, words=(sizes.vocabulary, sizes.hidden))
    encoder = helper.make_graph(
        [helper.make_node("Gather", ["words", "encoder_input_ids"], ["x"]), _by_head(sizes), *_split("x", CROSS)],
        "encoder",
        [value("encoder_input_ids", I32, ["b", "s"]), value("encoder_attention_mask", I32, ["b", "s"])],
        [value(name, F32, ["b", sizes.heads, "s", sizes.size]) for name, _ in CROSS],
        shared + weights(rng, wk=(sizes.hidden, sizes.hidden), wv=(sizes.hidden, sizes.hidden)),
    )
    return encoder, _cross_decoder(rng, sizes, tokens, True, shared)


def whisper(seed: int, sizes: Sizes | None = None) -> tuple[onnx.GraphProto, onnx.GraphProto]:
    """Whisper's interface: the encoder takes `(batch, mels, frames)` and makes the decoder's first step as well."""
    sizes = sizes or Sizes()
    rng = np.random.default_rng(seed)
    shared = weights(rng, words=(sizes.vocabulary, sizes.hidden))
    own = [("present_key_self_0", "wsk"), ("present_value_self_0", "wsv")]
    encoder = helper.make_graph(
        [
            helper.make_node("Transpose", ["encoder_input_ids"], ["x"], perm=[0, 2, 1]),
            _by_head(sizes),
            *_split("x", CROSS),
            helper.make_node("Gather", ["words", "decoder_input_ids"], ["d"]),
            *_split("d", own),
            helper.make_node("MatMul", ["d", "head"], ["logits"]),
            helper.make_node("Identity", ["x"], ["encoder_hidden_states"]),
        ],
        "encoder",
        [value("encoder_input_ids", F32, ["b", MELS, "s"]), value("decoder_input_ids", I32, ["b", "n"])],
        [
            value("logits", F32, ["b", "n", sizes.vocabulary]),
            value("encoder_hidden_states", F32, ["b", "s", MELS]),
            *(value(name, F32, ["b", sizes.heads, "n", sizes.size]) for name, _ in own),
            *(value(name, F32, ["b", sizes.heads, "s", sizes.size]) for name, _ in CROSS),
        ],
        shared
        + weights(
            rng,
            wk=(MELS, sizes.hidden),
            wv=(MELS, sizes.hidden),
            wsk=(sizes.hidden, sizes.hidden),
            wsv=(sizes.hidden, sizes.hidden),
            head=(sizes.hidden, sizes.vocabulary),
        ),
    )
    return encoder, _cross_decoder(rng, sizes, 1, False, shared)


def model(
    op: str, inputs: dict[str, np.ndarray | None], attributes: dict[str, Any], outputs: list[str]
) -> onnx.ModelProto:
    """A model of one node. None stands for an input that is left out."""
    names = [name if array is not None else "" for name, array in inputs.items()]
    kinds = {np.dtype(np.int32): I32, np.dtype(np.float32): F32}
    values = [value(name, kinds[array.dtype], list(array.shape)) for name, array in inputs.items() if array is not None]
    node = helper.make_node(op, names, outputs, domain=MICROSOFT, **attributes)
    results = [value(name, I32 if name == "sequences" else F32, None) for name in outputs]
    graph = helper.make_graph([node], "search", values, results)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(MICROSOFT, 1)])
    made.ir_version = 9
    return made


def given(inputs: dict[str, np.ndarray | None]) -> dict[str, np.ndarray]:
    return {name: array for name, array in inputs.items() if array is not None}


def theirs(made: onnx.ModelProto, inputs: dict[str, np.ndarray | None]) -> list[np.ndarray]:
    """What onnxruntime answers."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, given(inputs))
    return found


def one(number: float, dtype: Any = np.int32) -> np.ndarray:
    return np.asarray([number], dtype)
