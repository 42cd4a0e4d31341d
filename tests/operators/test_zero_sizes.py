"""Sizes of zero in every com.microsoft and ai.onnx.ml operator: the examples of the other files, one size less.

Each of an example's first sizes becomes 0 in turn. Where onnxruntime answers, it is the judge; where it does not, the
host form and the program agree, or the operator refuses in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.operators import (
    test_contrib,
    test_contrib_attention,
    test_contrib_quantized,
    test_contrib_state,
    test_ml,
)
from tests.operators.apart import Apart
from tests.operators.cases import Case, Draw
from tests.operators.oracle import MICROSOFT, ML, OPSETS, agree, host_outputs, one_node, traced_outputs
from transmuter_async.errors import OperatorError
from transmuter_async.operators import resolve

SIZES = 6
"""How many of an example's sizes are made 0, one at a time."""

DIFFERENT = {
    "DynamicQuantizeMatMul": "a sum over nothing is 0; onnxruntime takes a scale out of it and gives NaN",
    "DynamicQuantizeLSTM": "after no step the cell state is the initial one, not zeros",
    "MatMulIntegerToFloat": "a sum over nothing is 0, to which the bias is added; onnxruntime leaves it out",
    "QAttention": "a product over nothing is 0, to which the bias is added; onnxruntime leaves it as it was",
    "QGemm": "a sum over nothing is 0, which is the zero point; onnxruntime writes 0",
    "Tokenizer": "the result has one axis more, as the schema says; onnxruntime leaves it out where there are no tokens",
}
"""Operators whose answer for nothing is not onnxruntime's, and why."""

REFUSED = {
    "GatedRelativePositionBias": "no heads",
    "RotaryEmbedding": "heads without elements",
    "SparseAttention": "no heads",
    "WordConvEmbedding": "a kernel without width",
}
"""Operators that refuse what onnxruntime answers: these sizes mean nothing."""


class Fixed(Draw):
    """Draws from a generator alone; the size at a place is 0, where an example would have at least 1."""

    def __init__(self, seed: int, place: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._choices = np.random.default_rng(seed + 1_000_000)
        self._place = place
        self._count = 0

    def size(self, low: int = 1, high: int = 5) -> int:
        size = int(self._choices.integers(low, high + 1))
        self._count += 1
        return 0 if self._count - 1 == self._place and low == 1 else size

    def pick(self, options: Any) -> Any:
        options = list(options)
        return options[int(self._choices.integers(len(options)))]

    def flag(self) -> bool:
        return bool(self._choices.random() < 0.5)


def _all() -> Iterator[tuple[str, str, Callable[[Any], Case]]]:
    for module, domain in (
        (test_contrib, MICROSOFT),
        (test_contrib_attention, MICROSOFT),
        (test_contrib_quantized, MICROSOFT),
        (test_contrib_state, MICROSOFT),
        (test_ml, ML),
    ):
        for name, make in module.CASES.items():
            yield domain, name, make


@pytest.fixture(scope="module")
def apart() -> Iterator[Apart]:
    found = Apart()
    yield found
    found.close()


def _examples(make: Callable[[Any], Case]) -> Iterator[Case]:
    for place in range(SIZES):
        for seed in range(2):
            try:
                case = make(Fixed(100 * place + seed, place))
            except Exception:  # the example itself can't be made of such a size
                continue
            if any(isinstance(value, np.ndarray) and value.size == 0 for value in case.inputs):
                yield case


def _expected(apart: Apart, domain: str, name: str, case: Case) -> Any:
    if case.expected is not None:
        return case.expected
    options: dict[str, Any] = {"outputs": case.outputs, "constant": case.constant, "types": case.types}
    try:
        model, feeds = one_node(name, case.inputs, case.attributes, domain=domain, opset=case.opset, **options)
    except ValueError:  # a list attribute without elements has no type
        return None
    return apart.run(model, feeds)


@pytest.mark.parametrize(("domain", "name", "make"), [pytest.param(*each, id=each[1]) for each in _all()])
def test_nothing_in(domain: str, name: str, make: Callable[[Any], Case], apart: Apart) -> None:
    traced = False
    for case in _examples(make):
        options: dict[str, Any] = {"domain": domain, "opset": case.opset, "outputs": case.outputs}
        expected = _expected(apart, domain, name, case)
        try:
            ours = host_outputs(name, case.inputs, case.attributes, **options)
        except (OperatorError, ValueError):
            assert expected is None or name in REFUSED
            continue
        except ZeroDivisionError:  # the runner says this in words
            assert expected is None or name in REFUSED
            continue
        if expected is not None and name not in DIFFERENT:
            for index, (one, other) in enumerate(zip(ours, expected, strict=False)):
                if index not in case.skip and other is not None:
                    agree(case.view(one, index), case.view(other, index), rtol=1e-3, atol=1e-3, what=name)
        definition = resolve(domain, name, OPSETS[domain] if case.opset is None else case.opset)
        assert definition is not None
        if traced or definition.host or not case.traced:
            continue
        traced = True
        programs = traced_outputs(name, case.inputs, case.attributes, static=case.static, **options)
        for one, other in zip(programs, ours, strict=True):
            if other is not None:
                agree(one, other, rtol=1e-3, atol=1e-3, what=f"{name}, in a program")
