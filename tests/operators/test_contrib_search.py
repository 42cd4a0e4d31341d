"""com.microsoft's text generation against onnxruntime, over tiny decoders that are made here."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import transmuter_async as tm
from tests.operators.searches import Sizes, decoder_only, encoder_decoder, given, model, one, theirs

SIZES = Sizes()
VOCABULARY, EOS, PAD = SIZES.vocabulary, SIZES.eos, SIZES.pad


def _both(made: onnx.ModelProto, inputs: dict[str, np.ndarray | None]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    ours = list(tm.run_sync(made, given(inputs), compiler="eager").values())
    return ours, theirs(made, inputs)


def _prompt(seed: int) -> np.ndarray:
    """Two prompts, the second padded on the left; onnxruntime masks that only, not padding behind a token."""
    ids = np.random.default_rng(seed).integers(0, EOS, (2, 4)).astype(np.int32)
    ids[1, :2] = PAD
    if seed % 2:
        ids[0, 2:] = PAD
    return ids


GREEDY: dict[str, dict[str, Any]] = {
    "plain": {},
    "minimum": {"min_length": one(9)},
    "repetition": {"repetition_penalty": one(1.7, np.float32)},
    "masks": {
        "vocab_mask": (np.arange(VOCABULARY) % 3 != 1).astype(np.int32),
        "prefix_vocab_mask": (np.arange(2 * VOCABULARY).reshape(2, -1) % 4 != 2).astype(np.int32),
    },
    "ngram": {},
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", GREEDY)
def test_greedy_search(name: str, seed: int) -> None:
    inputs: dict[str, np.ndarray | None] = {"input_ids": _prompt(seed), "max_length": one(12)}
    for optional in ("min_length", "repetition_penalty", "vocab_mask", "prefix_vocab_mask"):
        inputs[optional] = GREEDY[name].get(optional)
    attributes = {
        "decoder": decoder_only(seed),
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "no_repeat_ngram_size": 2 if name == "ngram" else 0,
    }
    ours, theirs = _both(model("GreedySearch", inputs, attributes, ["sequences"]), inputs)
    # Once all rows have ended onnxruntime leaves the rest of its output unset; ours is padding.
    ended = 4 + int((ours[0][:, 4:] != PAD).any(0).sum()) + 1
    np.testing.assert_array_equal(ours[0][:, :ended], theirs[0][:, :ended])
    assert (ours[0][:, ended:] == PAD).all()


BEAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "early": {"early": 1},
    "penalty": {"length_penalty": one(0.4, np.float32)},
    "long": {"length_penalty": one(2.0, np.float32), "min_length": one(8)},
    "repetition": {"repetition_penalty": one(1.3, np.float32)},
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
        "max_length": one(11),
        "min_length": case.get("min_length", one(0)),
        "num_beams": one(beams),
        "num_return_sequences": one(answers),
        "length_penalty": case.get("length_penalty", one(1.0, np.float32)),
        "repetition_penalty": case.get("repetition_penalty", one(1.0, np.float32)),
        "vocab_mask": None,
        "prefix_vocab_mask": None,
        "attention_mask": None,
    }
    attributes = {
        "decoder": decoder_only(seed),
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "early_stopping": case.get("early", 0),
        "no_repeat_ngram_size": case.get("ngram", 0),
    }
    ours, theirs = _both(model("BeamSearch", inputs, attributes, ["sequences", "sequences_scores"]), inputs)
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_sampling_of_a_nucleus_of_one_is_greedy(seed: int) -> None:
    inputs: dict[str, np.ndarray | None] = {"input_ids": _prompt(seed), "max_length": one(10)}
    attributes = {"decoder": decoder_only(seed), "eos_token_id": EOS, "pad_token_id": PAD}
    greedy, _ = _both(model("GreedySearch", inputs, attributes, ["sequences"]), inputs)
    attributes |= {"top_p": 1e-6, "temperature": 0.9, "min_tokens_to_keep": 1}
    ours, theirs = _both(model("Sampling", inputs, attributes, ["sequences"]), inputs)
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_array_equal(ours[0], greedy[0])


def test_sampling_repeats_with_its_seed_and_follows_the_probabilities() -> None:
    prompt = np.tile(_prompt(1)[:1], (400, 1))
    inputs: dict[str, np.ndarray | None] = {"input_ids": prompt, "max_length": one(5)}
    attributes = {
        "decoder": decoder_only(1),
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "top_p": 0.0,
        "temperature": 3.0,
    }
    made = model("Sampling", inputs, attributes, ["sequences", "filtered_logits"])
    feeds = given(inputs)
    first = tm.run_sync(made, feeds, compiler="eager", seed=3)
    again = tm.run_sync(made, feeds, compiler="eager", seed=3)
    other = tm.run_sync(made, feeds, compiler="eager", seed=4)
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


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("penalty", "tokens"), [(1.0, 1), (0.5, 1), (1.0, "n")])
def test_beam_search_with_an_encoder(seed: int, penalty: float, tokens: Any) -> None:
    """A decoder whose input is declared longer than one token is given all of them at each step."""
    encoder, decoder = encoder_decoder(seed, tokens)
    ids = np.random.default_rng(seed).integers(0, EOS, (2, 5)).astype(np.int32)
    ids[1, 3:] = PAD
    inputs: dict[str, np.ndarray | None] = {
        "input_ids": ids,
        "max_length": one(9),
        "min_length": one(0),
        "num_beams": one(3),
        "num_return_sequences": one(2),
        "length_penalty": one(penalty, np.float32),
        "repetition_penalty": one(1.0, np.float32),
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
    made = model("BeamSearch", inputs, attributes, ["sequences", "sequences_scores"])
    ours, theirs = _both(made, inputs)
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-4, atol=1e-4)


def test_what_whisper_adds_is_refused_by_name() -> None:
    encoder, decoder = encoder_decoder(0)
    inputs: dict[str, np.ndarray | None] = {
        "input_ids": np.ones((1, 2), np.int32),
        "max_length": one(4),
        "min_length": None,
        "num_beams": one(1),
        "num_return_sequences": one(1),
        **dict.fromkeys(("length_penalty", "repetition_penalty", "vocab_mask", "prefix_vocab_mask", "attention_mask")),
        "decoder_input_ids": None,
        "logits_processor": one(1),
    }
    attributes = {
        "encoder": encoder,
        "decoder": decoder,
        "decoder_start_token_id": 2,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    made = model("WhisperBeamSearch", inputs, attributes, ["sequences"])
    feeds = given(inputs)
    with pytest.raises(tm.OperatorError, match="time stamp"):
        tm.run_sync(made, feeds, compiler="eager")
