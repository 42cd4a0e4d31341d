"""com.microsoft: operators that generate text — GreedySearch, Sampling, BeamSearch, WhisperBeamSearch.

They carry a decoder (and an encoder) as subgraphs and call it once a token. A decoder only is GPT-2's kind (`model_type` 0, a cache
`(2, rows, heads, tokens, size)` a layer); an encoder and a decoder are T5's (1) and Whisper's (2). The inputs and outputs of
the subgraphs come in the order of onnxruntime's converter.

A definition called with `Outside` bodies gives the search back that it would have made: the compiler runs the subgraphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transmuter_async.operators.context import Context, Subgraph
from transmuter_async.operators.contrib_choices import Beams, Draws, Greedy, Rules
from transmuter_async.operators.contrib_decoders import Reader
from transmuter_async.operators.contrib_generation import Outside, Search, State, generate
from transmuter_async.operators.registry import operator, xp

MICROSOFT = "com.microsoft"
SEARCHES = frozenset((MICROSOFT, name) for name in ("BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch"))
"""Operators that hold a `Search`."""

NOTE = "Unrolled in the program while its steps are few, else step by step on the host."


def _number(value: Any, default: float, dtype: Any = np.float32) -> Any:
    """A scalar that is given as a tensor of one element, or left out."""
    return np.asarray(default, dtype) if value is None else value.reshape(-1)[0].astype(dtype)


def _count(value: Any, default: int) -> int:
    return default if value is None else int(value.reshape(-1)[0])


def _reader(attributes: dict[str, Any], ids: Any, mask: Any, start: Any, copies: int) -> Reader:
    if start is None:
        start = np.full((ids.shape[0], 1), attributes["decoder_start_token_id"], np.int32)
    bodies = {name: attributes[name] for name in ("decoder", "encoder", "init_decoder")}
    return Reader(bodies, attributes["model_type"], attributes["pad_token_id"], ids, mask, start, copies)


def _rules(given: dict[str, Any], temperature: Any = None, presence: Any = None) -> Rules:
    return Rules(
        given["eos_token_id"],
        given["pad_token_id"],
        given["no_repeat_ngram_size"],
        _number(given["min_length"], 0, np.int32),
        _number(given["repetition_penalty"], 1),
        given["vocab_mask"],
        given["prefix_vocab_mask"],
        temperature,
        presence,
    )


def _outputs(search: Search) -> Any:
    outside = isinstance(search.reader.bodies["decoder"], Outside)
    return search if outside else generate(search)


# --- one answer a row -------------------------------------------------------------------------------------------------


def _one_each(given: dict[str, Any], chooser: Greedy | Draws, outputs: int) -> Any:
    """`(batch, max_length)` tokens, padding behind a row's end; and what the chooser carries."""
    longest, pad = _count(given["max_length"], 0), given["pad_token_id"]
    context = given["context"]
    ids = given["input_ids"]

    def result(state: State, _: Sequence[Any]) -> tuple[Any, ...]:
        rest = longest - state.sequences.shape[1]
        tokens = xp(state.sequences).pad(state.sequences, ((0, 0), (0, rest)), constant_values=np.int32(pad))
        return (tokens, state.own)[:outputs]

    context.budget((ids.shape[0], max(0, longest)), np.int32)
    reader = _reader(given, ids, given["attention_mask"], None, 1)
    return _outputs(Search(reader, chooser, longest, result, context))


@operator("GreedySearch", since_version=1, domain=MICROSOFT, static=("max_length",), loops=True, notes=NOTE)
def greedy_search_1(
    input_ids: Any,
    max_length: Any,
    min_length: Any = None,
    repetition_penalty: Any = None,
    vocab_mask: Any = None,
    prefix_vocab_mask: Any = None,
    attention_mask: Any = None,
    /,
    *,
    decoder: Subgraph,
    decoder_start_token_id: int = -1,
    encoder: Subgraph | None = None,
    eos_token_id: int,
    init_decoder: Subgraph | None = None,
    model_type: int = 0,
    no_repeat_ngram_size: int = 0,
    pad_token_id: int,
    vocab_size: int = -1,
    context: Context,
) -> Any:
    """The most likely token, again and again. The end token itself is not written, padding is."""
    given = dict(locals())
    return _one_each(given, Greedy(_rules(given)), 1)


@operator("Sampling", since_version=1, domain=MICROSOFT, static=("max_length",), random=True, loops=True, notes=NOTE)
def sampling_1(
    input_ids: Any,
    max_length: Any,
    min_length: Any = None,
    repetition_penalty: Any = None,
    vocab_mask: Any = None,
    prefix_vocab_mask: Any = None,
    attention_mask: Any = None,
    presence_mask: Any = None,
    seed: Any = None,
    /,
    *,
    custom: int = 0,
    decoder: Subgraph,
    decoder_start_token_id: int = -1,
    encoder: Subgraph | None = None,
    eos_token_id: int,
    filter_value: float = -1.0000000200408773e20,
    init_decoder: Subgraph | None = None,
    min_tokens_to_keep: int = 0,
    model_type: int = 0,
    no_repeat_ngram_size: int = 0,
    pad_token_id: int,
    presence_penalty: float = 0.0,
    temperature: float = 1.0,
    top_p: float = 0.0,
    vocab_size: int = -1,
    context: Context,
    n_outputs: int,
) -> Any:
    """Tokens drawn from the smallest set of likely ones whose probabilities add up to `top_p`.

    Draws come from the key of the run (the input `seed` wins), so that they repeat with it; they are not those of
    onnxruntime's generator. The second output holds the filtered logits of the last step.
    """
    given = dict(locals())
    penalty = None
    if presence_mask is not None and presence_penalty:
        penalty = presence_mask.astype(np.float32) * np.float32(presence_penalty)
    key = context.random_key(None if seed is None else seed.reshape(-1)[0])
    filler = np.float32(filter_value)
    rules = _rules(given, np.float32(temperature), penalty)
    return _one_each(given, Draws(rules, key, top_p, filler, min_tokens_to_keep, bool(custom)), n_outputs)


# --- beams ------------------------------------------------------------------------------------------------------------


def _beams(given: dict[str, Any], temperature: Any = None) -> Any:
    """`(batch, answers, max_length)` tokens, their scores, and the scores of all tokens at all steps."""
    context, outputs, ids = given["context"], given["n_outputs"], given["input_ids"]
    longest, beams = _count(given["max_length"], 0), _count(given["num_beams"], 1)
    answers = _count(given["num_return_sequences"], 1)
    if not 1 <= answers <= beams:
        raise ValueError(f"num_return_sequences is {answers}, but there are {beams} beams")
    batch = ids.shape[0]
    context.budget((batch, 3 * beams, max(0, longest)), np.int32)
    penalty = _number(given["length_penalty"], 1)
    early = bool(given["early_stopping"])
    chooser = Beams(_rules(given, temperature), beams, longest, penalty, early, outputs > 2)
    reader = _reader(given, ids, given["attention_mask"], given["decoder_input_ids"], beams)

    def result(state: State, shown: Sequence[Any]) -> tuple[Any, ...]:
        kept = chooser.answers(state.own, state.sequences, state.done)
        m = xp(kept.tokens)
        first = (m.asarray(kept.tokens[:, :answers]), m.asarray(kept.points[:, :answers]))
        return first[:outputs] if outputs <= 2 else (*first, _every(shown, batch, beams, search.steps, context))

    search = Search(reader, chooser, longest, result, context)
    return _outputs(search)


def _every(shown: Sequence[Any], batch: int, beams: int, steps: int, context: Context) -> Any:
    """`(steps, batch, beams, vocabulary)`, zeros for steps that were not made."""
    if not shown:
        return np.zeros((steps, batch, beams, 0), np.float32)
    m = xp(*shown)
    context.budget((steps, *shown[0].shape), np.float32)
    return m.pad(m.stack(shown), ((0, steps - len(shown)), (0, 0), (0, 0), (0, 0)))


STATIC = ("max_length", "num_beams", "num_return_sequences", "logits_processor")


@operator("BeamSearch", since_version=1, domain=MICROSOFT, static=STATIC, loops=True, notes=NOTE)
def beam_search_1(
    input_ids: Any,
    max_length: Any,
    min_length: Any,
    num_beams: Any,
    num_return_sequences: Any,
    length_penalty: Any = None,
    repetition_penalty: Any = None,
    vocab_mask: Any = None,
    prefix_vocab_mask: Any = None,
    attention_mask: Any = None,
    decoder_input_ids: Any = None,
    logits_processor: Any = None,
    /,
    *,
    decoder: Subgraph,
    decoder_start_token_id: int = -1,
    early_stopping: int = 0,
    encoder: Subgraph | None = None,
    eos_token_id: int,
    init_decoder: Subgraph | None = None,
    model_type: int = 0,
    no_repeat_ngram_size: int = 0,
    pad_token_id: int,
    vocab_size: int = -1,
    context: Context,
    n_outputs: int,
) -> Any:
    """Beam search: sequences `(batch, answers, max_length)`, their scores, and the scores of all tokens by step.

    Whether an input is done is decided by its own best running score; onnxruntime takes that of the first of the batch, so
    that its answer depends on what else is in it.
    """
    given = dict(locals())
    if _count(logits_processor, 0):
        raise ValueError(
            "logits_processor asks for a model's own rules (Whisper's time stamps), which are not supported"
        )
    return _beams(given)


@operator("WhisperBeamSearch", since_version=1, domain=MICROSOFT, static=STATIC, loops=True, notes=NOTE)
def whisper_beam_search_1(
    input_ids: Any,
    max_length: Any,
    min_length: Any,
    num_beams: Any,
    num_return_sequences: Any,
    length_penalty: Any = None,
    repetition_penalty: Any = None,
    vocab_mask: Any = None,
    prefix_vocab_mask: Any = None,
    attention_mask: Any = None,
    decoder_input_ids: Any = None,
    logits_processor: Any = None,
    cross_qk_layer_head: Any = None,
    extra_decoding_ids: Any = None,
    temperature: Any = None,
    /,
    *,
    beginning_timestamp_token_id: int | None = None,
    decoder: Subgraph,
    decoder_output_cross_qk: int | None = None,
    decoder_start_token_id: int = -1,
    early_stopping: int = 0,
    encoder: Subgraph | None = None,
    eos_token_id: int,
    init_decoder: Subgraph | None = None,
    model_type: int = 2,
    no_repeat_ngram_size: int = 0,
    no_speech_token_id: int | None = None,
    no_timestamps_token_id: int | None = None,
    pad_token_id: int,
    start_of_lm_token_id: int | None = None,
    transcribe_token_id: int | None = None,
    translate_token_id: int | None = None,
    vocab_size: int = -1,
    context: Context,
    n_outputs: int,
) -> Any:
    """BeamSearch over audio features. Time stamp rules and the outputs about cross attention and silence are refused."""
    given = dict(locals())
    if _count(logits_processor, 0) or decoder_output_cross_qk or cross_qk_layer_head is not None:
        raise ValueError("time stamp rules and cross-attention outputs of WhisperBeamSearch are not supported")
    if extra_decoding_ids is not None or (no_speech_token_id is not None and no_speech_token_id >= 0):
        raise ValueError("extra_decoding_ids and no_speech_token_id of WhisperBeamSearch are not supported")
    return _beams(given, _number(temperature, 1))
