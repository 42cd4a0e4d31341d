"""The judge of the conformance run, and a sample of the suite for the default test run.

The whole suite takes minutes: `nox -s conformance`, or `python -m tests.conformance.suite`.
"""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest

from tests.conformance import suite
from tests.conformance.suite import Case, Result, cases, grown, judged, previous, run_case, table

RANDOM = {
    "test_bernoulli",
    "test_bernoulli_double",
    "test_bernoulli_double_expanded",
    "test_bernoulli_expanded",
    "test_bernoulli_seed",
    "test_bernoulli_seed_expanded",
    "test_training_dropout",
    "test_training_dropout_default",
    "test_training_dropout_default_mask",
    "test_training_dropout_mask",
}
"""They expect the very numbers of numpy's generator; tests/operators/test_random.py holds ours to rate, scale and seed."""


@pytest.mark.parametrize("way", suite.WAYS)
def test_only_random_numbers_are_excepted(way: str) -> None:
    assert set(table()[way]) == RANDOM


def test_most_cases_run_inside_of_programs() -> None:
    assert table()["inside"] >= 1800


def test_the_table_got_no_worse_than_it_was_committed_before() -> None:
    before = previous()
    if before is None:
        pytest.skip("there is no git, or no earlier table")
    assert not grown(before, table())


def test_a_table_that_got_worse_is_noticed() -> None:
    now = table()
    worse = copy.deepcopy(now)
    worse["compiled"]["test_relu"] = "wrong"
    worse["inside"] -= 1
    assert grown(now, now) == []
    assert grown(worse, now) == []
    assert grown(now, worse) == [
        "compiled: test_relu passed before",
        f"{now['inside'] - 1} cases run inside of programs, {now['inside']} did before",
    ]


def test_failures_and_surprises_are_noticed() -> None:
    results = [Result("a", "wrong", "1 is not 2"), Result("b", "pass"), Result("c", "pass"), Result("d", "error")]
    assert judged(results, {"b": "wrong", "d": "error"}) == [
        "a fails: wrong: 1 is not 2",
        "b passes: take it out of the table (--update)",
    ]


# --- a sample ---------------------------------------------------------------------------------------------------------

SAMPLE = [
    case
    for case in cases()[::61]
    if case.name not in RANDOM and case.kind != "real"
]


@pytest.mark.compiles_itself
@pytest.mark.parametrize("way", suite.WAYS)
@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.name)
def test_a_sample_passes(case: Case, way: str) -> None:
    result = run_case(case, way)
    assert result.status == "pass", result.detail


@pytest.mark.compiles_itself
def test_programs_are_counted_by_what_jax_reports() -> None:
    (relu,) = (case for case in cases() if case.name == "test_relu")
    (nonzero,) = (case for case in cases() if case.name == "test_nonzero_example")
    compiled = run_case(relu, "compiled")
    assert (compiled.programs, compiled.breaks, compiled.compiles) == (1, 0, 1)
    assert compiled.inside
    assert run_case(relu, "host").compiles == 0
    assert not run_case(nonzero, "compiled").inside


@pytest.mark.compiles_itself
@pytest.mark.parametrize("way", suite.WAYS)
def test_a_wrong_result_is_noticed(way: str) -> None:
    (relu,) = (case for case in cases() if case.name == "test_relu")
    [(inputs, (expected,))] = relu.pairs(relu.model())
    expected = np.array(expected)
    expected.flat[3] += 1e-2
    off = Case(relu.name, relu.kind, relu.source, relu.directory, [(inputs, [expected])], relu.rtol, relu.atol)
    assert run_case(off, way).status == "wrong"


def test_the_table_is_of_the_installed_onnx() -> None:
    """Another version has other cases: the table is then made anew, `--update` says so."""
    assert table()["onnx"] == "1.23.2"
    if onnx.__version__ == table()["onnx"]:
        assert len(cases()) == 2033
