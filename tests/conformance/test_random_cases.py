"""The ten cases that expect numpy's own random numbers, held to what can be asked of any generator instead.

On the suite's inputs: shape and dtype, the rate of what is drawn or dropped, the scale of what is kept, the mask, and that equal seeds
give equal numbers in both forms.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import transmuter_async as tm
from tests.conformance.suite import Case, _by_name, cases
from tests.conformance.test_suite import RANDOM
from transmuter_async.graph import Model, read_model
from transmuter_async.operators import known

pytestmark = pytest.mark.compiles_itself

SEEDS = 400
FORMS = ("eager", "xla")
EXCEPTED = [case for case in cases() if case.name in RANDOM]
BERNOULLI = [case for case in EXCEPTED if "bernoulli" in case.name]
DROPOUT = [case for case in EXCEPTED if "dropout" in case.name]


def ready(case: Case) -> tuple[Model, dict[str, Any], list[Any]]:
    model = read_model(case.source, known=known)
    inputs, expected = case.pairs(case.model())[0]
    return model, _by_name(case.model(), model, [value.name for value in model.graph.inputs], inputs), expected


def rate(case: Case, given: dict[str, Any]) -> Any:
    """How often each element is one. The standard's body compares the wrong way round, and so says no to what its text says yes to."""
    (p,) = given.values()
    return 1 - p if case.name.endswith("_expanded") else p


def seeded(model: Model) -> bool:
    """Whether an attribute fixes the numbers, whatever the seed of the run."""
    return any("seed" in node.attributes for node in model.graph.walk())


def test_they_are_all_here() -> None:
    assert (len(BERNOULLI), len(DROPOUT)) == (6, 4)


@pytest.mark.parametrize("case", EXCEPTED, ids=lambda case: case.name)
def test_a_seed_gives_the_same_numbers_in_both_forms(case: Case) -> None:
    model, given, expected = ready(case)
    runs = {
        (form, seed): list(tm.run_sync(model, given, seed=seed, compiler=form).values()) for form in FORMS for seed in (1, 2)
    }
    for want, got in zip(expected, runs["xla", 1], strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
    for seed in (1, 2):
        for one, other in zip(runs["eager", seed], runs["xla", seed], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
    same = all(np.array_equal(a, b) for a, b in zip(runs["xla", 1], runs["xla", 2], strict=True))
    assert same == seeded(model)


@pytest.mark.parametrize("case", [case for case in BERNOULLI if "seed" not in case.name], ids=lambda case: case.name)
def test_each_element_is_one_as_often_as_its_input_says(case: Case) -> None:
    model, given, _ = ready(case)
    apply, params = tm.to_jax(model)
    p = rate(case, given)
    seeds = np.stack([np.zeros(SEEDS, np.uint32), np.arange(SEEDS, dtype=np.uint32)], axis=1)
    (drawn,) = jax.vmap(lambda seed: apply(params, given, seed=seed))(seeds).values()
    drawn = np.asarray(drawn, np.float64)
    assert set(np.unique(drawn)) == {0, 1}
    # Five standard deviations of a mean of so many draws, for each of the elements.
    assert (np.abs(drawn.mean(0) - p) <= 5 * np.sqrt(p * (1 - p) / SEEDS)).all()


@pytest.mark.parametrize("case", [case for case in BERNOULLI if "seed" in case.name], ids=lambda case: case.name)
def test_seeded_draws_are_zeros_and_ones_of_that_rate(case: Case) -> None:
    model, given, _ = ready(case)
    p = rate(case, given)
    (drawn,) = tm.run_sync(model, given).values()
    assert set(np.unique(drawn)) <= {0, 1}
    assert abs(drawn.sum() - p.sum()) <= 4 * np.sqrt((p * (1 - p)).sum())


@pytest.mark.parametrize("case", DROPOUT, ids=lambda case: case.name)
@pytest.mark.parametrize("form", FORMS)
def test_dropout_keeps_and_scales_what_its_mask_says(case: Case, form: str) -> None:
    model, given, expected = ready(case)
    x, *rest = given.values()
    ratio = next((float(value) for value in rest if value.dtype != np.bool_), 0.5)
    outputs = list(tm.run_sync(model, given, compiler=form).values())
    y = outputs[0]
    kept = outputs[1] if len(outputs) > 1 else y != 0
    assert kept.dtype == np.bool_
    np.testing.assert_allclose(y, np.where(kept, x / (1 - ratio), 0), rtol=1e-6)
    assert abs(kept.sum() - x.size * (1 - ratio)) <= 4 * np.sqrt(x.size * ratio * (1 - ratio))
    # The suite's own numbers are made in the same way.
    np.testing.assert_allclose(expected[0], np.where(expected[0] != 0, x / (1 - ratio), 0), rtol=1e-6)
