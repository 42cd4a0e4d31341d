"""com.microsoft's text generation: drawn examples against onnxruntime, on the host, in one program, and step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
import onnx
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

import transmuter_async as tm
from tests.conformance.suite import evaluate
from tests.conftest import COMPILES
from tests.operators.cases import Draw, examples
from tests.operators.searches import (
    MELS,
    Sizes,
    decoder_only,
    encoder_decoder,
    given,
    model,
    one,
    theirs,
    whisper,
)
from transmuter_async.graph import read_model
from transmuter_async.operators import contrib_generation, known

programs = settings(examples, max_examples=2)
"""A program takes seconds to compile: a decoder for each step."""

STEPS = 6


@dataclass
class Example:
    """One node.

    Attributes:
        inputs: By name, None where left out.
        sizes: Of its decoder.
        outputs: Their names.
        compared: Indices of the outputs that do not depend on draws.
        start: Tokens that the answers begin with.
        expected: The answer, where onnxruntime does not give it.
    """

    op: str
    inputs: dict[str, np.ndarray | None]
    attributes: dict[str, Any]
    sizes: Sizes
    outputs: list[str]
    compared: tuple[int, ...]
    start: int
    expected: list[Any] | None = None

    def made(self) -> onnx.ModelProto:
        return model(self.op, self.inputs, self.attributes, self.outputs)


def _sizes(draw: Draw, vocabulary: int) -> Sizes:
    return Sizes(draw.size(vocabulary, vocabulary + 6), draw.size(1, 3), draw.size(1, 4), draw.size(1, 2))


def _prompt(draw: Draw, sizes: Sizes) -> np.ndarray:
    """Ids `(batch, tokens)`, some rows padded on the left."""
    ids = draw.integers(0, sizes.eos, draw.size(1, 3), draw.size(1, 5), dtype=np.int32)
    for row in ids:
        row[: draw.size(0, len(row) - 1)] = sizes.pad
    return ids


def _allowed(draw: Draw, shape: tuple[int, ...], least: int) -> np.ndarray:
    """A mask with at least so many ones in each row: of tokens that are all forbidden any may come first."""
    mask = np.asarray(draw.rng.random(shape) < 0.7).astype(np.int32)
    for row in mask.reshape(-1, shape[-1]):
        row[draw.rng.permutation(shape[-1])[:least]] = 1
    return mask


def _rules(
    draw: Draw, sizes: Sizes, batch: int, length: int, *, least: int = 1, required: bool = False
) -> dict[str, Any]:
    """The optional inputs that say what may come next. `required`: onnxruntime wants the first ones."""
    some = lambda make: make() if required or draw.flag() else None  # noqa: E731
    return {
        "min_length": some(lambda: one(draw.size(0, length + STEPS))),
        "repetition_penalty": some(lambda: one(draw.pick([1.0, 1.3, 2.0, 0.7]), np.float32)),
        "vocab_mask": _allowed(draw, (sizes.vocabulary,), least) if draw.flag() else None,
        "prefix_vocab_mask": None,
    }


def _attributes(draw: Draw, sizes: Sizes) -> dict[str, Any]:
    return {
        "eos_token_id": sizes.eos,
        "pad_token_id": sizes.pad,
        "no_repeat_ngram_size": draw.pick([0, 0, 2, 3]),
    }


def _greedy(draw: Draw) -> Example:
    sizes = _sizes(draw, 6)
    ids = _prompt(draw, sizes)
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "max_length": one(ids.shape[1] + draw.size(1, STEPS)),
        **_rules(draw, sizes, len(ids), ids.shape[1]),
    }
    if inputs["vocab_mask"] is None and draw.flag():
        inputs["prefix_vocab_mask"] = _allowed(draw, (len(ids), sizes.vocabulary), 1)
    if draw.flag():
        inputs["attention_mask"] = (ids != sizes.pad).astype(np.int32)
    decoder = decoder_only(draw.size(0, 10_000), sizes)
    attributes = {"decoder": decoder, **_attributes(draw, sizes)}
    return Example("GreedySearch", inputs, attributes, sizes, ["sequences"], (0,), ids.shape[1])


def _sampling(draw: Draw) -> Example:
    """A set of one token, so that the draw does not matter; or one step, whose filtered logits do not depend on it.

    onnxruntime does not give out the filtered logits: the decoder's come from it, and the set is found here.
    """
    greedy = _greedy(draw)
    attributes = greedy.attributes | {"temperature": draw.pick([0.5, 1.0, 1.7]), "custom": int(draw.flag())}
    inputs = greedy.inputs | {"attention_mask": greedy.inputs.get("attention_mask")}
    outputs = ["sequences", "filtered_logits"]
    if draw.flag():
        attributes |= {"top_p": 1e-6, "min_tokens_to_keep": 1}
        inputs |= {"presence_mask": None, "seed": one(draw.size(0, 99))}
        return Example("Sampling", inputs, attributes, greedy.sizes, outputs, (0,), greedy.start)
    ids, sizes = inputs["input_ids"], greedy.sizes
    assert ids is not None
    attributes |= {
        "top_p": draw.pick([0.0, 0.1, 0.5, 0.8, 0.95, 1.0]),
        "min_tokens_to_keep": draw.size(0, 3),
        "presence_penalty": draw.pick([0.0, 0.6]),
        "no_repeat_ngram_size": 0,
        "filter_value": draw.pick([-1e20, -100.0]),
    }
    inputs |= dict.fromkeys(("min_length", "repetition_penalty", "vocab_mask", "prefix_vocab_mask"))
    inputs |= {
        "max_length": one(ids.shape[1] + 1),
        "presence_mask": draw.integers(0, 2, len(ids), sizes.vocabulary, dtype=np.int32),
        "seed": one(draw.size(0, 99)),
    }
    logits = _first_logits(attributes["decoder"], ids, inputs["attention_mask"], sizes)
    scores = logits / attributes["temperature"] - attributes["presence_penalty"] * inputs["presence_mask"]
    return Example(
        "Sampling", inputs, attributes, sizes, outputs, (1,), greedy.start, [None, _filtered(scores, attributes)]
    )


def _first_logits(decoder: onnx.GraphProto, ids: np.ndarray, mask: np.ndarray | None, sizes: Sizes) -> np.ndarray:
    """Of the prompt's last token, float64, by onnxruntime."""
    made = onnx.helper.make_model(
        decoder, opset_imports=[onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("com.microsoft", 1)]
    )
    made.ir_version = 9
    mask = (ids != sizes.pad).astype(np.int32) if mask is None else mask
    places = np.maximum(np.cumsum(mask, axis=1) - 1, 0).astype(np.int32)
    past = np.zeros((2, len(ids), sizes.heads, 0, sizes.size), np.float32)
    feeds = {"input_ids": ids, "position_ids": places, "attention_mask": mask}
    logits = theirs(made, {**feeds, **{f"past_{layer}": past for layer in range(sizes.layers)}})[0]
    return np.asarray(logits[:, -1], np.float64)


def _filtered(scores: np.ndarray, attributes: dict[str, Any]) -> np.ndarray:
    """float64: what lies outside of the likely set gets the filter's value. By the words of the schema, a row at a time."""
    top_p, keep = attributes["top_p"], attributes["min_tokens_to_keep"]
    result = scores.astype(np.float32)
    if not 0 < top_p < 1:
        return result
    for row, chances in enumerate(np.exp(scores - scores.max(1, keepdims=True))):
        chances = chances / chances.sum()
        ranking = np.argsort(-chances, kind="stable")
        total = 0.0
        for place, token in enumerate(ranking):
            if attributes["custom"]:
                dropped = total > top_p and place >= keep
            else:  # what is below the set adds up to at most 1 - top_p
                dropped = chances[ranking[place:]].sum() <= 1 - top_p and place >= max(1, keep)
            if dropped:
                result[row, token] = attributes["filter_value"]
            total += chances[token]
    return result


def _beam_inputs(draw: Draw, ids: np.ndarray, sizes: Sizes, start: int, *, least: int = 1) -> dict[str, Any]:
    beams = draw.size(1, 4)
    return {
        "input_ids": ids,
        "max_length": one(start + draw.size(least, STEPS)),
        "min_length": one(draw.pick([0, 0, start + 2, start + STEPS])),
        "num_beams": one(beams),
        "num_return_sequences": one(draw.size(1, beams)),
        "length_penalty": one(draw.pick([1.0, 0.3, 2.0]), np.float32),
        "repetition_penalty": one(draw.pick([1.0, 1.3]), np.float32),
        "vocab_mask": _allowed(draw, (sizes.vocabulary,), 2 * beams + 1) if draw.flag() else None,
        "prefix_vocab_mask": None,
        "attention_mask": None,
    }


OUTPUTS = ["sequences", "sequences_scores"]


def _beam(draw: Draw) -> Example:
    sizes = _sizes(draw, 11)
    ids = _prompt(draw, sizes)
    seed, early = draw.size(0, 10_000), draw.size(0, 1)
    attributes = {**_attributes(draw, sizes), "early_stopping": early}
    if draw.flag():
        attributes["decoder"] = decoder_only(seed, sizes)
        inputs = _beam_inputs(draw, ids, sizes, ids.shape[1])
        if draw.flag():
            inputs["attention_mask"] = (ids != sizes.pad).astype(np.int32)
        start = ids.shape[1]
    else:
        encoder, decoder = encoder_decoder(seed, draw.pick([1, "n"]), sizes)
        attributes |= {"encoder": encoder, "decoder": decoder, "model_type": 1, "decoder_start_token_id": 2}
        inputs, start = _beam_inputs(draw, ids, sizes, 1), 1
    return Example("BeamSearch", inputs, attributes, sizes, OUTPUTS, (0, 1), start)


def _whisper(draw: Draw) -> Example:
    sizes = _sizes(draw, 11)
    batch, start = draw.size(1, 3), draw.size(1, 3)
    features = draw.floats(batch, MELS, draw.size(1, 5))
    encoder, decoder = whisper(draw.size(0, 10_000), sizes)
    inputs = _beam_inputs(draw, features, sizes, start, least=2)  # onnxruntime fails where there is but one step
    inputs["decoder_input_ids"] = draw.integers(0, sizes.eos, batch, start, dtype=np.int32)
    if draw.flag():
        left_out = ("logits_processor", "cross_qk_layer_head", "extra_decoding_ids")
        inputs |= {**dict.fromkeys(left_out), "temperature": one(draw.pick([0.5, 1.0, 2.0]), np.float32)}
    attributes = {
        **_attributes(draw, sizes),
        "early_stopping": draw.size(0, 1),
        "encoder": encoder,
        "decoder": decoder,
        "model_type": 2,
        "decoder_start_token_id": 2,
    }
    return Example("WhisperBeamSearch", inputs, attributes, sizes, OUTPUTS, (0, 1), start)


CASES: dict[str, Callable[[Draw], Example]] = {
    "BeamSearch": _beam,
    "GreedySearch": _greedy,
    "Sampling": _sampling,
    "WhisperBeamSearch": _whisper,
}


def _agree(example: Example, ours: list[np.ndarray], expected: list[np.ndarray], compared: tuple[int, ...]) -> None:
    for index in compared:
        one, other = ours[index], expected[index]
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        if index == 0 and one.ndim == 2:
            # Once all rows have ended onnxruntime leaves the rest of its output unset; ours is padding.
            tail = one[:, example.start :]
            ended = example.start + int(np.flatnonzero((tail != example.sizes.pad).any(0)).max(initial=-1)) + 2
            assert (one[:, ended:] == example.sizes.pad).all()
            one, other = one[:, :ended], other[:, :ended]
        if one.dtype.kind == "i":
            np.testing.assert_array_equal(one, other)
        else:  # sums of logarithms of float32 probabilities
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


PER_ROW = ("input_ids", "attention_mask", "decoder_input_ids")


def _expected(example: Example) -> list[np.ndarray]:
    """onnxruntime's answer; with beams row by row.

    Whether an input of a batch is done, onnxruntime decides by the best running score of the first one: its answer
    depends on what else is in the batch.
    """
    ids = example.inputs["input_ids"]
    assert ids is not None
    if "num_beams" not in example.inputs:
        return theirs(example.made(), example.inputs)
    answers = []
    for row in range(len(ids)):
        taken = {k: v[row : row + 1] if k in PER_ROW and v is not None else v for k, v in example.inputs.items()}
        answers.append(theirs(model(example.op, taken, example.attributes, example.outputs), taken))
    return [np.concatenate(each) for each in zip(*answers, strict=True)]


@examples
@drawn(st.data())
@pytest.mark.parametrize("name", CASES)
def test_host_form(name: str, data: st.DataObject) -> None:
    example = CASES[name](Draw(data))
    ours = list(tm.run_sync(example.made(), given(example.inputs), compiler="eager").values())
    _agree(example, ours, _expected(example) if example.expected is None else example.expected, example.compared)


def _compiled(example: Example, **options: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], int, int]:
    """Outputs on the host and compiled, the programs that were compiled, and the breaks."""
    found = read_model(example.made(), known=known)
    host, _, _ = evaluate(found, given(example.inputs), "host")
    before = len(COMPILES.by_jax)
    compiled, programs, breaks = evaluate(found, given(example.inputs), "compiled", **options)
    assert len(COMPILES.by_jax) - before == programs
    return host, compiled, programs, breaks


def _same(host: dict[str, np.ndarray], compiled: dict[str, np.ndarray]) -> None:
    for name, value in host.items():
        assert value.dtype == compiled[name].dtype
        assert value.shape == compiled[name].shape
        if value.dtype.kind == "i":
            np.testing.assert_array_equal(value, compiled[name])
        else:
            np.testing.assert_allclose(value, compiled[name], rtol=1e-4, atol=1e-4)


@programs
@drawn(st.data())
@pytest.mark.parametrize("name", CASES)
def test_one_program_gives_the_same(name: str, data: st.DataObject) -> None:
    host, compiled, programs, breaks = _compiled(CASES[name](Draw(data)))
    assert (programs, breaks) == (1, 0)
    _same(host, compiled)


def _decoder_example(op: str, steps: int, seed: int = 0, **more: Any) -> Example:
    sizes = Sizes(layers=1)
    ids = np.random.default_rng(seed).integers(0, sizes.eos, (2, 3)).astype(np.int32)
    inputs: dict[str, Any] = {"input_ids": ids, "max_length": one(3 + steps)}
    if op == "BeamSearch":
        inputs |= {"min_length": None, "num_beams": one(3), "num_return_sequences": one(2)}
        # onnxruntime's shape inference wants names for optional inputs up to the last one that it looks at.
        inputs |= dict.fromkeys(("length_penalty", "repetition_penalty", "vocab_mask", "prefix_vocab_mask"))
    attributes = {"decoder": decoder_only(seed, sizes), "eos_token_id": sizes.eos, "pad_token_id": sizes.pad, **more}
    outputs = {"BeamSearch": [*OUTPUTS, "scores"], "Sampling": ["sequences", "filtered_logits"]}.get(op, ["sequences"])
    return Example(op, inputs, attributes, sizes, outputs, (0,), 3)


def test_the_steps_after_the_last_end_are_skipped() -> None:
    """Every token but the end is forbidden: the answers end at the first step, and the rest is padding."""
    example = _decoder_example("GreedySearch", 4)
    only_the_end = (np.arange(example.sizes.vocabulary) == example.sizes.eos).astype(np.int32)
    example.inputs |= {"min_length": None, "repetition_penalty": None, "vocab_mask": only_the_end}
    host, compiled, programs, breaks = _compiled(example)
    assert (programs, breaks) == (1, 0)
    _same(host, compiled)
    assert (compiled["sequences"][:, 3:] == example.sizes.pad).all()


def test_scores_of_all_tokens() -> None:
    """`(steps, batch, beams, vocabulary)`: those of steps that are not made are zero, in the program as well."""
    example = _decoder_example("BeamSearch", 4, early_stopping=1)
    host, compiled, programs, breaks = _compiled(example)
    assert (programs, breaks) == (1, 0)
    _same(host, compiled)
    assert host["scores"].shape == (4, 2, 3, example.sizes.vocabulary)


@pytest.mark.slow
def test_draws_are_the_same_in_a_program() -> None:
    example = _decoder_example("Sampling", 4, temperature=3.0)
    host, compiled, programs, _ = _compiled(example)
    assert programs == 1
    _same(host, compiled)
    seeded = _decoder_example("Sampling", 4, temperature=3.0)
    left_out = (
        "min_length",
        "repetition_penalty",
        "vocab_mask",
        "prefix_vocab_mask",
        "attention_mask",
        "presence_mask",
    )
    seeded.inputs |= {**dict.fromkeys(left_out), "seed": one(7)}
    host, compiled, programs, _ = _compiled(seeded)
    assert programs == 1
    _same(host, compiled)


async def test_a_seed_is_no_part_of_the_key() -> None:
    """Draws change with `run(seed=)` and with the input `seed`, and neither compiles anew."""
    example = _decoder_example("Sampling", 3, temperature=3.0)
    left_out = (
        "min_length",
        "repetition_penalty",
        "vocab_mask",
        "prefix_vocab_mask",
        "attention_mask",
        "presence_mask",
    )
    example.inputs |= {**dict.fromkeys(left_out), "seed": one(0)}
    feeds = given(example.inputs)
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(example.made())
        answers = [(await compiled.run(feeds | {"seed": one(seed)}))["sequences"] for seed in (1, 2, 3, 1)]
        statistics = await compiled.statistics()
    assert statistics.compiles == 1
    np.testing.assert_array_equal(answers[0], answers[3])
    assert len({answer.tobytes() for answer in answers}) > 1


@pytest.mark.parametrize("op", ["GreedySearch", "Sampling", "BeamSearch"])
def test_a_search_too_long_for_one_program_runs_its_decoder_in_programs(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contrib_generation, "UNROLLED_OPERATIONS", 100)
    more = {"temperature": 3.0} if op == "Sampling" else {}
    example = _decoder_example(op, 3, **more)
    found = read_model(_behind_a_node(example), known=known)
    feeds = given(example.inputs)
    host, _, _ = evaluate(found, feeds, "host")
    compiled, programs, breaks = evaluate(found, feeds, "compiled")
    assert breaks == 1
    assert programs == 4  # what comes before, the prompt, and two steps
    _same(host, compiled)
    # A cache that cannot hold a program for each step would compile them all at every call.
    compiled, programs, breaks = evaluate(found, feeds, "compiled", cache_size=2)
    assert (programs, breaks) == (1, 1)
    _same(host, compiled)


def _behind_a_node(example: Example) -> onnx.ModelProto:
    """The prompt comes out of a program: no input could be made static instead of breaking."""
    made = example.made()
    search = made.graph.node[0]
    search.input[0] = "given"
    made.graph.node.insert(0, onnx.helper.make_node("Add", ["input_ids", "nothing"], ["given"]))
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((), np.int32), "nothing"))
    return made


def test_the_break_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contrib_generation, "UNROLLED_OPERATIONS", 100)
    example = _decoder_example("GreedySearch", 3)

    async def explained() -> str:
        async with tm.Runtime() as runtime:
            compiled = await runtime.compile(_behind_a_node(example))
            await compiled.run(given(example.inputs))
            return str(await compiled.explain())

    assert "to unroll 3 steps of a decoder: they have about" in anyio.run(explained)


def test_no_rows_and_no_steps() -> None:
    for op in ("GreedySearch", "Sampling", "BeamSearch"):
        example = _decoder_example(op, 0)
        host, compiled, _, _ = _compiled(example)
        _same(host, compiled)
        assert host["sequences"].shape[-1] == 3
        example = _decoder_example(op, 2)
        example.inputs["input_ids"] = np.zeros((0, 3), np.int32)
        host, compiled, _, _ = _compiled(example)
        _same(host, compiled)
        assert host["sequences"].size == 0


def test_a_length_below_the_prompt_is_refused() -> None:
    example = _decoder_example("GreedySearch", -1)
    for compiler in ("eager", "xla"):
        with pytest.raises(tm.OperatorError, match="max_length is 2, but the prompt has 3 tokens"):
            tm.run_sync(example.made(), given(example.inputs), compiler=compiler)
