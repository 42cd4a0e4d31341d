"""com.microsoft's text generation against onnxruntime, over tiny decoders that are made here."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import transmuter_async as tm

TESTED = ("GreedySearch", "Sampling", "BeamSearch", "WhisperBeamSearch")
VOCABULARY, HEADS, SIZE, LAYERS = 13, 2, 3, 2
HIDDEN = HEADS * SIZE
EOS, PAD = 11, 12


def _weights(rng: np.random.Generator, **shapes: tuple[int, ...]) -> list[onnx.TensorProto]:
    return [numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name) for name, shape in shapes.items()]


def _value(name: str, dtype: int, shape: list[Any] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def _decoder_only(seed: int) -> onnx.GraphProto:
    """GPT-2's interface: embeddings, two Attention nodes with a past, logits."""
    rng = np.random.default_rng(seed)
    i32, f32 = TensorProto.INT32, TensorProto.FLOAT
    inputs = [
        _value("input_ids", i32, ["b", "s"]),
        _value("position_ids", i32, ["b", "s"]),
        _value("attention_mask", i32, ["b", "t"]),
    ]
    outputs = [_value("logits", f32, ["b", "s", VOCABULARY])]
    weights = _weights(rng, words=(VOCABULARY, HIDDEN), places=(32, HIDDEN), head=(HIDDEN, VOCABULARY))
    nodes = [
        helper.make_node("Gather", ["words", "input_ids"], ["w"]),
        helper.make_node("Gather", ["places", "position_ids"], ["p"]),
        helper.make_node("Add", ["w", "p"], ["x0"]),
    ]
    for layer in range(LAYERS):
        weights += _weights(rng, **{f"qkv{layer}": (HIDDEN, 3 * HIDDEN), f"bias{layer}": (3 * HIDDEN,)})
        shape = [2, "b", HEADS, "past", SIZE]
        inputs.append(_value(f"past_{layer}", f32, shape))
        outputs.append(_value(f"present_{layer}", f32, [2, "b", HEADS, "t", SIZE]))
        nodes += [
            helper.make_node(
                "Attention",
                [f"x{layer}", f"qkv{layer}", f"bias{layer}", "attention_mask", f"past_{layer}"],
                [f"a{layer}", f"present_{layer}"],
                domain="com.microsoft",
                num_heads=HEADS,
                unidirectional=1,
            ),
            helper.make_node("Add", [f"x{layer}", f"a{layer}"], [f"x{layer + 1}"]),
        ]
    nodes.append(helper.make_node("MatMul", [f"x{LAYERS}", "head"], ["logits"]))
    return helper.make_graph(nodes, "decoder", inputs, outputs, weights)


def _model(
    op: str, inputs: dict[str, np.ndarray | None], attributes: dict[str, Any], outputs: list[str]
) -> onnx.ModelProto:
    # onnxruntime's shape inference wants names for optional inputs up to the last one that it looks at.
    names = [name if value is not None else "" for name, value in inputs.items()]
    kinds = {np.dtype(np.int32): TensorProto.INT32, np.dtype(np.float32): TensorProto.FLOAT}
    values = [
        _value(name, kinds[value.dtype], list(value.shape)) for name, value in inputs.items() if value is not None
    ]
    node = helper.make_node(op, names, outputs, domain="com.microsoft", **attributes)
    results = [_value(name, TensorProto.INT32 if name == "sequences" else TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph([node], "search", values, results)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    )
    model.ir_version = 9
    return model


def _both(model: onnx.ModelProto, inputs: dict[str, np.ndarray | None]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    feeds = {name: value for name, value in inputs.items() if value is not None}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    theirs = session.run(None, feeds)
    ours = list(tm.run_sync(model, feeds, compiler="eager").values())
    return ours, theirs


def _prompt(seed: int) -> np.ndarray:
    """Two prompts, the second padded on the left; onnxruntime masks that only, not padding behind a token."""
    ids = np.random.default_rng(seed).integers(0, EOS, (2, 4)).astype(np.int32)
    ids[1, :2] = PAD
    if seed % 2:
        ids[0, 2:] = PAD
    return ids


def _one(value: float, dtype: Any = np.int32) -> np.ndarray:
    return np.asarray([value], dtype)


GREEDY: dict[str, dict[str, Any]] = {
    "plain": {},
    "minimum": {"min_length": _one(9)},
    "repetition": {"repetition_penalty": _one(1.7, np.float32)},
    "masks": {
        "vocab_mask": (np.arange(VOCABULARY) % 3 != 1).astype(np.int32),
        "prefix_vocab_mask": (np.arange(2 * VOCABULARY).reshape(2, -1) % 4 != 2).astype(np.int32),
    },
    "ngram": {},
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", GREEDY)
def test_greedy_search(name: str, seed: int) -> None:
    inputs: dict[str, np.ndarray | None] = {"input_ids": _prompt(seed), "max_length": _one(12)}
    for optional in ("min_length", "repetition_penalty", "vocab_mask", "prefix_vocab_mask"):
        inputs[optional] = GREEDY[name].get(optional)
    attributes = {
        "decoder": _decoder_only(seed),
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "no_repeat_ngram_size": 2 if name == "ngram" else 0,
    }
    ours, theirs = _both(_model("GreedySearch", inputs, attributes, ["sequences"]), inputs)
    # Once all rows have ended onnxruntime leaves the rest of its output unset; ours is padding.
    ended = 4 + int((ours[0][:, 4:] != PAD).any(0).sum()) + 1
    np.testing.assert_array_equal(ours[0][:, :ended], theirs[0][:, :ended])
    assert (ours[0][:, ended:] == PAD).all()


BEAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "early": {"early": 1},
    "penalty": {"length_penalty": _one(0.4, np.float32)},
    "long": {"length_penalty": _one(2.0, np.float32), "min_length": _one(8)},
    "repetition": {"repetition_penalty": _one(1.3, np.float32)},
    "ngram": {"ngram": 2},
    "one": {"beams": 1, "answers": 1},
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", BEAMS)
def test_beam_search(name: str, seed: int) -> None:
    case = BEAMS[name]
    beams, answers = case.get("beams", 3), case.get("answers", 2)
    inputs: dict[str, np.ndarray | None] = {
        "input_ids": _prompt(seed),
        "max_length": _one(11),
        "min_length": case.get("min_length", _one(0)),
        "num_beams": _one(beams),
        "num_return_sequences": _one(answers),
        "length_penalty": case.get("length_penalty", _one(1.0, np.float32)),
        "repetition_penalty": case.get("repetition_penalty", _one(1.0, np.float32)),
        "vocab_mask": None,
        "prefix_vocab_mask": None,
        "attention_mask": None,
    }
    attributes = {
        "decoder": _decoder_only(seed),
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "early_stopping": case.get("early", 0),
        "no_repeat_ngram_size": case.get("ngram", 0),
    }
    ours, theirs = _both(_model("BeamSearch", inputs, attributes, ["sequences", "sequences_scores"]), inputs)
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_sampling_of_a_nucleus_of_one_is_greedy(seed: int) -> None:
    inputs: dict[str, np.ndarray | None] = {"input_ids": _prompt(seed), "max_length": _one(10)}
    attributes = {"decoder": _decoder_only(seed), "eos_token_id": EOS, "pad_token_id": PAD}
    greedy, _ = _both(_model("GreedySearch", inputs, attributes, ["sequences"]), inputs)
    attributes |= {"top_p": 1e-6, "temperature": 0.9, "min_tokens_to_keep": 1}
    ours, theirs = _both(_model("Sampling", inputs, attributes, ["sequences"]), inputs)
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_array_equal(ours[0], greedy[0])


def test_sampling_repeats_with_its_seed_and_follows_the_probabilities() -> None:
    prompt = np.tile(_prompt(1)[:1], (400, 1))
    inputs: dict[str, np.ndarray | None] = {"input_ids": prompt, "max_length": _one(5)}
    attributes = {
        "decoder": _decoder_only(1),
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "top_p": 0.0,
        "temperature": 3.0,
    }
    model = _model("Sampling", inputs, attributes, ["sequences", "filtered_logits"])
    feeds = {name: value for name, value in inputs.items() if value is not None}
    first = tm.run_sync(model, feeds, compiler="eager", seed=3)
    again = tm.run_sync(model, feeds, compiler="eager", seed=3)
    other = tm.run_sync(model, feeds, compiler="eager", seed=4)
    np.testing.assert_array_equal(first["sequences"], again["sequences"])
    assert (first["sequences"] != other["sequences"]).any()
    logits = first["filtered_logits"][0].astype(np.float64)
    chance = np.exp(logits - logits.max())
    chance /= chance.sum()
    chance[PAD] += chance[EOS]  # an end is written as padding
    chance[EOS] = 0
    counts = np.bincount(first["sequences"][:, 4], minlength=VOCABULARY) / 400
    np.testing.assert_allclose(counts, chance, atol=5 * np.sqrt(0.25 / 400))


# --- encoder and decoder --------------------------------------------------------------------------------------------------


def _encoder_decoder(seed: int, tokens: Any = 1) -> tuple[onnx.GraphProto, onnx.GraphProto]:
    """T5's interface: the encoder gives the keys and values of cross attention, the decoder attends to them and to itself."""
    rng = np.random.default_rng(seed)
    i32, f32 = TensorProto.INT32, TensorProto.FLOAT
    shared = _weights(rng, words=(VOCABULARY, HIDDEN))
    encoder = helper.make_graph(
        [
            helper.make_node("Gather", ["words", "encoder_input_ids"], ["x"]),
            helper.make_node("MatMul", ["x", "wk"], ["k"]),
            helper.make_node("MatMul", ["x", "wv"], ["v"]),
            helper.make_node("Constant", [], ["shape"], value_ints=[0, 0, HEADS, SIZE]),
            *(
                node
                for name, short in (("present_key_cross_0", "k"), ("present_value_cross_0", "v"))
                for node in (
                    helper.make_node("Reshape", [short, "shape"], [short + "4"]),
                    helper.make_node("Transpose", [short + "4"], [name], perm=[0, 2, 1, 3]),
                )
            ),
        ],
        "encoder",
        [_value("encoder_input_ids", i32, ["b", "s"]), _value("encoder_attention_mask", i32, ["b", "s"])],
        [_value(f"present_{kind}_cross_0", f32, ["b", HEADS, "s", SIZE]) for kind in ("key", "value")],
        shared + _weights(rng, wk=(HIDDEN, HIDDEN), wv=(HIDDEN, HIDDEN)),
    )
    past = [f"past_{kind}_{part}_0" for part in ("self", "cross") for kind in ("key", "value")]
    decoder = helper.make_graph(
        [
            helper.make_node("Gather", ["words", "input_ids"], ["x"]),
            helper.make_node("MatMul", ["x", "wqkv"], ["qkv"]),
            helper.make_node("Split", ["qkv"], ["q", "k", "v"], axis=2, num_outputs=3),
            helper.make_node(
                "MultiHeadAttention",
                ["q", "k", "v", "", "", "", *past[:2]],
                ["a", "present_key_self_0", "present_value_self_0"],
                domain="com.microsoft",
                num_heads=HEADS,
            ),
            helper.make_node("Add", ["x", "a"], ["y"]),
            helper.make_node("MatMul", ["y", "wq"], ["cq"]),
            helper.make_node(
                "MultiHeadAttention",
                ["cq", *past[2:], "", "encoder_attention_mask"],
                ["c"],
                domain="com.microsoft",
                num_heads=HEADS,
            ),
            helper.make_node("Add", ["y", "c"], ["z"]),
            helper.make_node("MatMul", ["z", "head"], ["logits"]),
        ],
        "decoder",
        [
            _value("input_ids", i32, ["b", tokens]),
            _value("encoder_attention_mask", i32, ["b", "s"]),
            *(_value(name, f32, ["b", HEADS, "t", SIZE]) for name in past),
        ],
        [
            _value("logits", f32, ["b", "n", VOCABULARY]),
            *(_value(f"present_{kind}_self_0", f32, ["b", HEADS, "u", SIZE]) for kind in ("key", "value")),
        ],
        shared + _weights(rng, wqkv=(HIDDEN, 3 * HIDDEN), wq=(HIDDEN, HIDDEN), head=(HIDDEN, VOCABULARY)),
    )
    return encoder, decoder


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("penalty", "tokens"), [(1.0, 1), (0.5, 1), (1.0, "n")])
def test_beam_search_with_an_encoder(seed: int, penalty: float, tokens: Any) -> None:
    """A decoder whose input is declared longer than one token is given all of them at each step."""
    encoder, decoder = _encoder_decoder(seed, tokens)
    ids = np.random.default_rng(seed).integers(0, EOS, (2, 5)).astype(np.int32)
    ids[1, 3:] = PAD
    inputs: dict[str, np.ndarray | None] = {
        "input_ids": ids,
        "max_length": _one(9),
        "min_length": _one(0),
        "num_beams": _one(3),
        "num_return_sequences": _one(2),
        "length_penalty": _one(penalty, np.float32),
        "repetition_penalty": _one(1.0, np.float32),
        "vocab_mask": None,
        "prefix_vocab_mask": None,
        "attention_mask": None,
    }
    attributes = {
        "encoder": encoder,
        "decoder": decoder,
        "model_type": 1,
        "decoder_start_token_id": 2,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    model = _model("BeamSearch", inputs, attributes, ["sequences", "sequences_scores"])
    model.opset_import[0].version = 18
    ours, theirs = _both(model, inputs)
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-4, atol=1e-4)


def test_what_whisper_adds_is_refused_by_name() -> None:
    encoder, decoder = _encoder_decoder(0)
    inputs: dict[str, np.ndarray | None] = {
        "input_ids": np.ones((1, 2), np.int32),
        "max_length": _one(4),
        "min_length": None,
        "num_beams": _one(1),
        "num_return_sequences": _one(1),
        **dict.fromkeys(("length_penalty", "repetition_penalty", "vocab_mask", "prefix_vocab_mask", "attention_mask")),
        "decoder_input_ids": None,
        "logits_processor": _one(1),
    }
    attributes = {
        "encoder": encoder,
        "decoder": decoder,
        "decoder_start_token_id": 2,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    model = _model("WhisperBeamSearch", inputs, attributes, ["sequences"])
    feeds = {name: value for name, value in inputs.items() if value is not None}
    with pytest.raises(tm.OperatorError, match="time stamp"):
        tm.run_sync(model, feeds, compiler="eager")
