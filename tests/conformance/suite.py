"""The ONNX backend suite of the installed `onnx`, run through the compiler in three ways.

`host`: every node on the host form. `compiled`: programs, with breaks where values must be known; inputs that decide
shapes are given as static values, so that the node itself lands inside a program where that is possible at all.
`breaks`: a forced break before and after every node, so that whatever goes in or out of one went over the host.

    python -m tests.conformance.suite [--way host|compiled|breaks] [--op Reshape] [--case test_x] [--verbose] [--update]

`pending.json` is the judge: the cases that do not pass, by way, which only get fewer, and the number of cases that ran
inside of XLA programs, which only grows. A whole run fails where a case fails that the table does not list, where a
listed one passes, and where the number got smaller. `--update` rewrites the table after a whole run.
"""

from __future__ import annotations

import argparse
import functools
import glob
import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

from transmuter_async.compiler import Missing, Options, SegmentCache, pinned, prepare
from transmuter_async.errors import BreakRefused, NeedsValue, UnsupportedModel
from transmuter_async.graph import Model, Node, read_model
from transmuter_async.operators import known

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator", "real")
WAYS = ("host", "compiled", "breaks")
PENDING = Path(__file__).with_name("pending.json")
PROCESSES = 2
PASSING_OPSET = 25
"""Of the Identity nodes around forced breaks: one that takes every type."""
COMPILED = "/jax/core/compile/backend_compile_duration"
"""What jax reports for each program that XLA has compiled."""


@dataclass(frozen=True)
class Case:
    """One case of the suite: a model, and pairs of inputs and expected outputs."""

    name: str
    kind: str
    source: Any  # a ModelProto or a path
    directory: str | None
    data: Any
    rtol: float
    atol: float

    def model(self) -> onnx.ModelProto:
        return self.source if isinstance(self.source, onnx.ModelProto) else onnx.load(self.source)

    def operators(self) -> set[str]:
        return {node.op_type for node in _walk(self.model().graph)}

    def pairs(self, model: onnx.ModelProto) -> list[tuple[list[Any], list[Any]]]:
        if self.data is not None:
            return [([_array(x) for x in ins], [_array(x) for x in outs]) for ins, outs in self.data]
        if self.kind == "real":
            return [_light_data(self.source, model)]
        found = []
        for folder in sorted(glob.glob(os.path.join(str(self.directory), "test_data_set*"))):
            ins = _protos(folder, "input", model.graph.input)
            found.append((ins, _protos(folder, "output", model.graph.output)))
        return found


@dataclass(frozen=True)
class Result:
    """How a case went: "pass", "unsupported", "wrong" or "error".

    `programs` counts compiled programs that ran nodes, `breaks` the nodes that ran outside of them, `compiles` what jax
    reported of XLA meanwhile.
    """

    name: str
    status: str
    detail: str = ""
    programs: int = 0
    breaks: int = 0
    compiles: int = 0

    @property
    def inside(self) -> bool:
        """Whether everything that the case computes was inside of programs that XLA really compiled."""
        return self.status == "pass" and self.programs > 0 and not self.breaks and self.compiles >= self.programs


@functools.cache
def cases() -> tuple[Case, ...]:
    """Every case of the installed suite, in the loader's order."""
    found = []
    for kind in KINDS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numpy, where the suite computes what it expects
            tests = load_model_tests(kind=kind)
        for test in tests:
            source: Any = test.model
            directory = test.model_dir
            if source is None and test.url and test.url.startswith("onnx/backend/test/data/light/"):
                source = str(Path(onnx.__file__).parent.parent / test.url)
            elif source is None:
                source = os.path.join(str(directory), "model.onnx")
            found.append(Case(test.name, kind, source, directory, test.data_sets, test.rtol, test.atol))
    return tuple(found)


@functools.cache
def single_nodes() -> dict[str, list[Case]]:
    """The cases of one node, by its operator."""
    found: dict[str, list[Case]] = {}
    for case in cases():
        if case.kind == "node" and not case.name.endswith("_expanded"):
            nodes = case.model().graph.node
            if len(nodes) == 1:
                found.setdefault(nodes[0].op_type, []).append(case)
    return found


def run_case(case: Case, way: str) -> Result:
    """Run one case one way."""
    programs = breaks = 0
    before = _xla().count
    try:
        proto = case.model()
        model = read_model(case.source, known=known)
        names = [value.name for value in model.graph.inputs]
        for inputs, expected in case.pairs(proto):
            given = _by_name(proto, model, names, inputs)
            outputs, ran, broke = evaluate(model, given, way)
            programs += ran
            breaks += broke
            _compare(expected, [outputs[value.name] for value in model.graph.outputs], case)
    except UnsupportedModel as error:
        return Result(case.name, "unsupported", str(error).splitlines()[0][:300])
    except AssertionError as error:
        return Result(case.name, "wrong", " ".join(str(error).split())[:300])
    except Exception as error:  # every failure of a case is a result
        return Result(case.name, "error", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return Result(case.name, "pass", programs=programs, breaks=breaks, compiles=_xla().count - before)


class _Compiles:
    """Counts the programs that XLA compiles in this process."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, seconds: float, **_: Any) -> None:
        self.count += event == COMPILED


@functools.cache
def _xla() -> _Compiles:
    return _Compiles()


def evaluate(model: Model, given: dict[str, Any], way: str, **options: Any) -> tuple[dict[str, Any], int, int]:
    """Outputs of a model, the number of programs that ran, and of breaks."""
    if way == "host":
        prepared = prepare(model, Options(compiler="eager", optimize=False))
        execution = prepared.start(prepared.take_inputs(given), seed=0, device=False)
        with pinned():
            finished = execution.advance(SegmentCache(1), lambda fact: None)
        return finished.outputs, 0, 0  # type: ignore[union-attr]
    if way == "breaks":
        separated, forced = between_breaks(model)
        return _compiled(separated, given, (), "allow", options | {"force_breaks": forced})
    statics: list[str] = []
    while True:
        try:
            return _compiled(model, given, tuple(statics), "error", options)
        except Exception as error:
            needs = _needs(error)
            if needs is None and isinstance(error, BreakRefused):  # nothing that a static input could meet
                return _compiled(model, given, tuple(statics), "allow", options)
            if needs is None:
                raise
            if needs.producer is None and needs.value in given and needs.value not in statics:
                statics.append(needs.value)
                continue
            return _compiled(model, given, tuple(statics), "allow", options)


def between_breaks(model: Model) -> tuple[Model, frozenset[int]]:
    """The model with an Identity on every value before and after each top-level node, and the places of these."""
    graph = model.graph
    # Gradient names tensors by their names, which it would not find again.
    if any(node.op_type == "Gradient" for node in graph.nodes):
        return model, frozenset(range(len(graph.nodes)))
    nodes: list[Node] = []
    forced: list[int] = []

    def pass_on(node: Node, source: str, target: str) -> None:
        forced.append(len(nodes))
        names = {"inputs": (source,), "outputs": (target,), "name": f"to {target}"}
        nodes.append(replace(node, op_type="Identity", domain="", opset=PASSING_OPSET, attributes={}, **names))

    for number, node in enumerate(graph.nodes):
        inputs = []
        for place, name in enumerate(node.inputs):
            if not name or name in graph.initializers:
                inputs.append(name)
                continue
            inputs.append(f"{name} {number}.{place}")
            pass_on(node, name, inputs[-1])
        outputs = [name and f"{name} of {number}" for name in node.outputs]
        nodes.append(replace(node, inputs=tuple(inputs), outputs=tuple(outputs)))
        for source, target in zip(outputs, node.outputs, strict=True):
            if target:
                pass_on(node, source, target)
    return replace(model, graph=replace(graph, nodes=tuple(nodes))), frozenset(forced)


def _compiled(
    model: Model, given: dict[str, Any], statics: tuple[str, ...], breaks: str, options: dict[str, Any]
) -> tuple[dict[str, Any], int, int]:
    # Without optimization nothing is folded before the trace: the node itself is what is tested.
    prepared = prepare(
        model, Options(optimize=False, static_inputs=statics, breaks=breaks, min_segment_nodes=1, **options)
    )
    execution = prepared.start(prepared.take_inputs(given), seed=0, device=False)
    cache = SegmentCache(4)
    facts: list[Any] = []
    with pinned():
        while isinstance(step := execution.advance(cache, facts.append), Missing):
            cache.put(step.job.run(facts.append), facts.append)
    names = [type(fact).__name__ for fact in facts]
    ran = sum(type(f).__name__ == "SegmentReady" and f.compiled for f in facts)
    return step.outputs, ran, names.count("BreakStarted")


def _needs(error: BaseException | None) -> NeedsValue | None:
    while error is not None:
        if isinstance(error, NeedsValue):
            return error
        error = error.__cause__
    return None


def _by_name(proto: onnx.ModelProto, model: Model, names: list[str], inputs: list[Any]) -> dict[str, Any]:
    declared = [value.name for value in proto.graph.input]
    if len(inputs) <= len(names):
        declared = names
    return {name: value for name, value in zip(declared, inputs, strict=False) if name in names}


def _array(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        value = numpy_helper.to_array(value)
    if isinstance(value, (list, tuple)):
        return [_array(item) for item in value]
    if isinstance(value, np.ndarray) and value.dtype.kind in "US":
        return value.astype(object)
    return value


def _compare(expected: list[Any], outputs: list[Any], case: Case) -> None:
    """As the suite's runner compares, which can't take a sequence of scalars."""
    assert len(expected) == len(outputs), f"{len(outputs)} values, expected {len(expected)}"
    for want, got in zip(expected, outputs, strict=True):
        assert isinstance(want, list) == isinstance(got, list), f"a {type(got).__name__}, expected {type(want).__name__}"
        if isinstance(want, list):
            _compare(want, got, case)
        else:
            Runner.assert_similar_outputs([want], [got], case.rtol, case.atol)


def _protos(folder: str, word: str, declared: Any) -> list[Any]:
    found: list[Any] = []
    for index in range(len(glob.glob(os.path.join(folder, f"{word}_*.pb")))):
        content = Path(folder, f"{word}_{index}.pb").read_bytes()
        kind = declared[index].type.WhichOneof("value")
        if kind == "sequence_type":
            found.append(numpy_helper.to_list(onnx.SequenceProto.FromString(content)))
        elif kind == "optional_type":
            found.append(numpy_helper.to_optional(onnx.OptionalProto.FromString(content)))
        else:
            found.append(numpy_helper.to_array(onnx.TensorProto.FromString(content)))
    return found


def _light_data(path: str, model: onnx.ModelProto) -> tuple[list[Any], list[Any]]:
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [Runner.generate_dummy_data(value) for value in model.graph.input if value.name not in weights]
    prefix = os.path.splitext(path)[0]
    outputs = [
        numpy_helper.to_array(onnx.TensorProto.FromString(Path(f"{prefix}_output_{index}.pb").read_bytes()))
        for index in range(len(model.graph.output))
    ]
    return inputs, outputs


def _walk(graph: onnx.GraphProto) -> Any:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _walk(attribute.g)
            for inner in attribute.graphs:
                yield from _walk(inner)


# --- the judge ---------------------------------------------------------------------------------------------------------


def table() -> dict[str, Any]:
    """`pending.json`: `onnx` version, `inside` programs, and for each way the status of each case that does not pass."""
    found: dict[str, Any] = json.loads(PENDING.read_text("utf-8"))
    return found


def previous() -> dict[str, Any] | None:
    """The table as it was committed before what is there now; None where there is no such commit, or no git."""
    now = PENDING.read_text("utf-8")
    try:
        for commit in _git("log", "-n", "20", "--format=%H", "--", PENDING.name).split():
            text = _git("show", f"{commit}:./{PENDING.name}")
            if text != now:
                found: dict[str, Any] = json.loads(text)
                return found
    except (OSError, subprocess.CalledProcessError):
        return None
    return None


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=PENDING.parent, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout


def grown(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What got worse from one table to a later one, in words."""
    worse = [
        f"{way}: {name} passed before"
        for way in WAYS
        if way in before
        for name in sorted(set(after.get(way, ())) - set(before[way]))
    ]
    if after["inside"] < before["inside"]:
        worse.append(f"{after['inside']} cases run inside of programs, {before['inside']} did before")
    return worse


def judged(results: Iterable[Result], listed: dict[str, str]) -> list[str]:
    """Where results of one way differ from its table, in words."""
    problems = []
    for result in results:
        if result.status != "pass" and result.name not in listed:
            problems.append(f"{result.name} fails: {result.status}: {result.detail}")
        elif result.status == "pass" and result.name in listed:
            problems.append(f"{result.name} passes: take it out of the table (--update)")
    return problems


def _work(way: str, indices: Sequence[int]) -> list[Result]:
    return [run_case(cases()[index], way) for index in indices]


def run_cases(way: str, indices: Sequence[int], processes: int = PROCESSES) -> list[Result]:
    """Run cases one way, in several processes where there are many."""
    if processes < 2 or len(indices) < 50:
        return _work(way, indices)
    # Interleaved, for the expensive cases stand together; small parts, so that both processes end at the same time.
    count = processes * 16
    parts = [list(indices[start::count]) for start in range(count)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        done = {r.name: r for part in pool.map(_work, [way] * count, parts) for r in part}
    return [done[cases()[index].name] for index in indices]


def main() -> int:
    """Run the suite from the command line; 1 where the table says otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, action="append")
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--update", action="store_true")
    arguments = parser.parse_args()
    whole = not (arguments.op or arguments.case or arguments.kind)
    pending = table() if PENDING.exists() else {"onnx": onnx.__version__, "inside": 0}
    found: dict[str, Any] = {"onnx": onnx.__version__, "inside": pending["inside"]}
    problems: list[str] = []
    chosen = [
        index
        for index, case in enumerate(cases())
        if (not arguments.case or any(word in case.name for word in arguments.case))
        and (not arguments.kind or case.kind in arguments.kind)
        and (not arguments.op or set(arguments.op) & case.operators())
    ]
    ways = arguments.way or WAYS
    for way in ways:
        started = time.perf_counter()
        results = run_cases(way, chosen, arguments.processes)
        took = time.perf_counter() - started
        counts = Counter(result.status for result in results)
        inside = sum(result.inside for result in results)
        problems.extend(f"{way}: {problem}" for problem in judged(results, pending.get(way, {})))
        if arguments.verbose:
            for result in results:
                print(f"{way:8} {result.status:11} {result.name} {result.programs}/{result.breaks} {result.detail}")
        print(f"{way}: {dict(counts)} of {len(chosen)}, {inside} inside a program, {took:.0f} s", flush=True)
        found[way] = dict(sorted((r.name, r.status) for r in results if r.status != "pass"))
        if way == "compiled":
            found["inside"] = inside
            if whole and onnx.__version__ == pending["onnx"] and inside < pending["inside"]:
                problems.append(f"{inside} cases run inside of programs, the table says {pending['inside']}")
    if arguments.update:
        if not whole or set(ways) != set(WAYS):
            print("--update takes a whole run, of every way")
            return 1
        problems = grown(pending, found) if onnx.__version__ == pending["onnx"] else []
        if not problems:
            PENDING.write_text(json.dumps(found, indent=1) + "\n")
    elif whole and (before := previous()) is not None:
        problems.extend(grown(before, pending))
    print("\n".join(problems) if problems else "as the table says")
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.exit(130)
