"""Single operators and patterns against onnxruntime, family by family: where a lowering is worth work."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.benchmarks import cases_array, cases_dense, cases_window
from tests.benchmarks.build import Case
from tests.benchmarks.frame import Figure, each, quick
from tests.benchmarks.versus import Wrong, compare, figures

SECONDS = 0.45
QUICK = 2
"""Cases of each family with `--quick`."""

FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    **cases_window.FAMILIES,
    **cases_dense.FAMILIES,
    **cases_array.FAMILIES,
}


@each(FAMILIES)
def family(cases: Callable[[], Iterator[Case]]) -> Iterator[Figure]:
    """Operators: {}."""
    wrong = []
    for number, case in enumerate(cases()):
        if quick() and number >= QUICK:
            break
        try:
            found = compare(case.source, case.inputs, seconds=SECONDS, tolerance=case.tolerance)
        except Exception as error:  # the others of the family are measured all the same
            wrong.append(error if isinstance(error, Wrong) else RuntimeError(f"{type(error).__name__}: {error}"))
            wrong[-1].add_note(case.name)
            continue
        yield from figures(case.name, found, more=False)
    if wrong:
        raise RuntimeError("; ".join(f"{error.__notes__[0]}: {error}" for error in wrong))
