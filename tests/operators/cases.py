"""Examples for one node against onnxruntime: what Hypothesis draws, how an example is compared, and how exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st

from tests.operators.oracle import MICROSOFT, OPSETS, agree, host_outputs, onnxruntime_outputs, traced_outputs
from transmuter_async.operators import resolve

_common: dict[str, Any] = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
}
examples = settings(max_examples=100, **_common)
few_examples = settings(max_examples=5, **_common)
"""For programs: compiling one takes a hundred times as long as all the rest of an example."""


class Draw:
    """Sizes and choices from Hypothesis, numbers from a generator that it seeds."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self.rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))

    def size(self, low: int = 1, high: int = 5) -> int:
        return self._data.draw(st.integers(low, high))

    def shape(self, rank: int, low: int = 0, high: int = 4) -> tuple[int, ...]:
        return tuple(self.size(low, high) for _ in range(rank))

    def pick(self, options: Sequence[Any]) -> Any:
        return self._data.draw(st.sampled_from(list(options)))

    def flag(self) -> bool:
        return self._data.draw(st.booleans())

    def floats(self, *shape: int, scale: float = 1.0, dtype: Any = np.float32) -> np.ndarray:
        return np.asarray(self.rng.normal(size=shape) * scale).astype(dtype)

    def positive(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return np.asarray(self.rng.uniform(0.05, 1, size=shape) * scale).astype(np.float32)

    def integers(self, low: int, high: int, *shape: int, dtype: Any = np.int64) -> np.ndarray:
        return np.asarray(self.rng.integers(low, high, shape)).astype(dtype)

    def codes(self, dtype: Any, *shape: int) -> np.ndarray:
        """Any values of an integer dtype."""
        limits = np.iinfo(dtype)
        return np.asarray(self.rng.integers(limits.min, int(limits.max) + 1, shape)).astype(dtype)

    def list(self, count: int, scale: float = 1.0) -> list[float]:
        return [float(value) for value in self.floats(count, scale=scale)]


@dataclass
class Case:
    """One example.

    Attributes:
        constant: Inputs that onnxruntime wants as initializers.
        static: Inputs that stay host values in the traced form.
        skip: Outputs that are not compared.
        types: Dtypes of outputs that onnxruntime can't infer.
        view: Output and index to the part of it that is defined.
        expected: What to compare with, instead of onnxruntime.
    """

    inputs: Sequence[Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    constant: Sequence[int] = ()
    static: Sequence[int] = ()
    skip: Sequence[int] = ()
    types: dict[int, Any] | None = None
    view: Callable[[Any, int], Any] = lambda value, index: value
    expected: Sequence[Any] | None = None
    traced: bool = True
    opset: int | None = None

    def __post_init__(self) -> None:
        inputs = list(self.inputs)
        while inputs and inputs[-1] is None:
            inputs.pop()
        self.inputs = inputs


@dataclass(frozen=True)
class Tolerance:
    relative: float
    absolute: float
    reason: str


EXACT = Tolerance(0, 0, "integers, copies and comparisons")
FLOAT = Tolerance(1e-4, 1e-5, "float32 sums in another order")


def check(name: str, case: Case, tolerance: Tolerance, *, domain: str = MICROSOFT, traced: bool = False) -> None:
    """Compare the host form, or the traced one, with the oracle. An example that can't be traced is set aside then."""
    definition = resolve(domain, name, OPSETS[domain] if case.opset is None else case.opset)
    assert definition is not None, f"{domain}:{name} has no definition"
    if traced and not case.traced:
        assume(False)
    expected = case.expected
    if expected is None:
        expected = onnxruntime_outputs(
            name,
            case.inputs,
            case.attributes,
            domain=domain,
            opset=case.opset,
            outputs=case.outputs,
            constant=case.constant,
            types=case.types,
        )
    options: dict[str, Any] = {"domain": domain, "opset": case.opset, "outputs": case.outputs}
    if traced:
        results = traced_outputs(name, case.inputs, case.attributes, static=case.static, **options)
    else:
        results = host_outputs(name, case.inputs, case.attributes, **options)
    way = "traced" if traced else "host"
    assert len(results) >= len(expected), f"{name} {way}: {len(results)} outputs, {len(expected)} expected"
    for index, (ours, theirs) in enumerate(zip(results, expected, strict=False)):
        if index in case.skip or theirs is None:
            continue
        if isinstance(theirs, np.ndarray):
            assert ours.shape == theirs.shape, f"{name} {way}: output {index} {ours.shape}, expected {theirs.shape}"
        agree(
            case.view(ours, index),
            case.view(theirs, index),
            rtol=tolerance.relative,
            atol=tolerance.absolute,
            what=f"{name} output {index}, {way}, {case.attributes}",
        )
