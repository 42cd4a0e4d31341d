"""What becomes of a run's figures: sums over models, the comparison of two runs, the page and its picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks import picture
from tests.benchmarks.frame import Figure, find
from tests.benchmarks.light import NETWORKS
from tests.benchmarks.zoo import MODELS, WORST

__all__ = ["PAGE", "RUN", "difference", "kept", "merged", "number", "pages", "ratios", "summed"]

DOCS = Path(__file__).resolve().parents[2] / "docs"
RUN = DOCS / "benchmarks.json"
PAGE = DOCS / "benchmarks.md"
PICTURE = DOCS / "benchmarks.svg"
AGAINST = ": against onnxruntime"
PROCESSOR = ": processor time against one thread of onnxruntime"
MEAN = 1.30
"""The geometric mean over the float models."""
SUMMARY = "summary.models"

Run = dict[str, Any]


def number(value: float) -> str:
    """Three digits, as many as a reader needs."""
    if math.isfinite(value) and (abs(value) >= 1000 or value == int(value)):
        return f"{value:.0f}"
    return f"{value:.3g}"


def kept(figure: Mapping[str, Any]) -> str:
    """The bound of a figure, and whether it keeps it; "" where it has none."""
    if figure["bound"] is None:
        return ""
    return f"{'≥' if figure['least'] else '≤'} {figure['bound']:g}  {'ok' if figure['met'] else 'MISSED'}"


def ratios(run: Run, module: str, ending: str = AGAINST) -> dict[str, dict[str, float]]:
    """The ratios of a module: by benchmark, by what was called."""
    return {
        each["name"].partition(".")[2]: {
            figure["name"].removesuffix(ending): figure["value"]
            for figure in each["figures"]
            if figure["name"].endswith(ending)
        }
        for each in run["benchmarks"]
        if each["name"].startswith(f"{module}.")
    }


def summed(run: Run) -> Run:
    """The run with what follows from all models together, where all were measured."""
    rest = [each for each in run["benchmarks"] if each["name"] != SUMMARY]
    run = {**run, "benchmarks": rest}
    if not {each.name for each in find(["zoo", "light"])} <= {each["name"] for each in rest}:
        return run
    figures = [figure.to_dict() for figure in _sums(run)]
    title = "All models at batch 1 against onnxruntime's better thread setting"
    result = {"name": SUMMARY, "title": title, "figures": figures, "skipped": None, "failed": None, "seconds": 0.0}
    return {**run, "benchmarks": [*rest, result]}


def _sums(run: Run) -> Iterator[Figure]:
    for ending, words, bounds in ((AGAINST, "", (MEAN, WORST)), (PROCESSOR, ", processor time", (None, None))):
        zoo, light = ratios(run, "zoo", ending), ratios(run, "light", ending)
        first = {name: next(iter(values.values())) for name, values in {**zoo, **light}.items() if values}
        floats = {name: value for name, value in first.items() if name not in MODELS or not MODELS[name].quantized}
        if not floats:
            continue
        worst = max(floats, key=floats.__getitem__)
        yield Figure(
            f"float models{words}: geometric mean", _mean(floats.values()), "×", bounds[0], note=f"{len(floats)} models"
        )
        yield Figure(f"float models{words}: the slowest", floats[worst], "×", bounds[1], note=worst)
        yield Figure(f"all models{words}: geometric mean", _mean(first.values()), "×", note=f"{len(first)} models")
        for family, names in (
            ("silero", [name for name in first if name.startswith("silero")]),
            ("OCR", [name for name in first if name.startswith("ocr")]),
            ("networks of the onnx wheel", [name for name in NETWORKS if name in first]),
        ):
            if names:
                yield Figure(f"{family}{words}: geometric mean", _mean(first[name] for name in names), "×")


def _mean(values: Any) -> float:
    return statistics.geometric_mean(values)


def merged(before: Run, after: Run) -> Run:
    """The earlier run with the figures of the later one in place of its own; each of these says when it was made."""
    late = {each["name"]: {**each, "date": after["machine"]["date"]} for each in after["benchmarks"]}
    kept_ones = [late.pop(each["name"], each) for each in before["benchmarks"]]
    return summed({**before, "benchmarks": [*kept_ones, *late.values()]})


def difference(before: Run, after: Run, *, least: float = 0.1) -> str:
    """A table of what both runs have, with the factor from the one to the other; figures that changed by less than `least` are left out."""
    old = {(each["name"], figure["name"]): figure for each in before["benchmarks"] for figure in each["figures"]}
    rows, factors, same, mine = [], [], 0, set()
    for each in after["benchmarks"]:
        for figure in each["figures"]:
            key = (each["name"], figure["name"])
            mine.add(key)
            if key not in old:
                rows.append((math.inf, f"{each['name']}: {figure['name']}", "-", number(figure["value"]), "new"))
                continue
            a, b = old[key]["value"], figure["value"]
            factor = b / a if a > 0 and b > 0 else math.nan
            if figure["name"].endswith(AGAINST) and factor > 0:
                factors.append(factor)
            if a == b or abs(math.log(factor)) < math.log1p(least) if factor > 0 else a == b:
                same += 1
                continue
            rows.append((factor, f"{each['name']}: {figure['name']}", number(a), number(b), f"{factor:.2f}"))
    rows += [
        (-math.inf, f"{name}: {figure}", number(old[name, figure]["value"]), "-", "gone")
        for name, figure in old.keys() - mine
    ]
    rows.sort(key=lambda row: -math.inf if math.isnan(row[0]) else row[0])
    lines = [f"{_where(run)}" for run in (before, after)]
    lines += ["", f"{'':80} {'before':>10} {'after':>10} {'factor':>8}"]
    lines += [f"{name[:80]:80} {a:>10} {b:>10} {factor:>8}" for _, name, a, b, factor in rows]
    lines.append(f"\n{same} figures changed by less than {least:.0%}.")
    if factors:
        lines.append(f"Ratios to onnxruntime: geometric mean of the factors {_mean(factors):.3f} over {len(factors)}.")
    return "\n".join(lines)


def _where(run: Run) -> str:
    machine = run["machine"]
    loads = f"load {machine.get('load_at_start')} to {machine.get('load_at_end')}"
    return f"{machine.get('date')}: {machine.get('processor')}, {machine.get('cores')} cores, {loads}"


def pages(run: Run) -> dict[Path, str]:
    """The page and its picture, by file."""
    rows = []
    for module in ("zoo", "light"):
        for name, values in ratios(run, module).items():
            if values:
                first, *others = values.values()
                bound = next(
                    f["bound"]
                    for each in run["benchmarks"]
                    if each["name"] == f"{module}.{name}"
                    for f in each["figures"]
                )
                rows.append(picture.Row(name, first, tuple(others), bound))
    return {PAGE: _page(run), PICTURE: picture.draw(rows, "latency against onnxruntime, less is better")}


def _page(run: Run) -> str:
    machine = run["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    loads = sorted(value for each in run["benchmarks"] for value in each.get("load") or () if value is not None)
    lines = [
        "# Benchmarks",
        "",
        "The figures of the last full run, and every bound that they are held to. Generated from `docs/benchmarks.json`; do not edit.",
        "",
        "```text",
        run["command"],
        "```",
        "",
        "| | |",
        "|---|---|",
        f"| date | {machine['date']} |",
        f"| processor | {machine['processor']} |",
        f"| cores | {machine['cores']} |",
        f"| memory | {machine['memory_gib']} GiB |",
        f"| system | {machine['system']}, Python {machine['python']} |",
        f"| versions | {versions} |",
        f"| load (processes that run or wait, mean of a minute) | {machine['load_at_start']} at the start, {machine['load_at_end']} at the end"
        + (f", {statistics.median(loads):.2g} in the middle, {loads[-1]:.2g} at most |" if loads else " |"),
        "",
        "The suite itself keeps about one core busy, or two where a program uses both; a load above that is somebody else's, and all times",
        "are then longer than they need be. Ratios are of medians that were taken in turns in one process. `nox -s bench` makes a run,",
        "`nox -s bench -- --check` fails where a bound is missed, `python -m tests.benchmarks compare A.json B.json` compares two,",
        "`python -m tests.benchmarks page RUN.json` makes this page of one.",
        "",
        "## Models",
        "",
        "Ours against the better of onnxruntime with one and with two threads; outputs were compared before. A call is numpy in, numpy out.",
        "Processor time is that of all threads together, against onnxruntime with one thread: it says what a program costs, and stays about the same",
        "where others use the machine, too.",
        "",
        "![Latency of models against onnxruntime, on a logarithmic axis](benchmarks.svg)",
        "",
        *_models(run),
        "",
        "## Bounds",
        "",
        "| benchmark | figure | bound | measured | |",
        "|---|---|---|---|---|",
        *_bounds(run),
        "",
        "## Operators and patterns",
        "",
        "Single operators at sizes of real models, worst first within each family. A call of ours takes about 50 µs more than the operator itself:",
        "where onnxruntime needs a few microseconds, the ratio tells that and nothing else.",
        "",
        *_operators(run),
        "## Everything else",
        "",
        *_others(run),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _named(run: Run, *modules: str) -> Iterator[Mapping[str, Any]]:
    yield from (each for each in run["benchmarks"] if each["name"].partition(".")[0] in modules)


def _models(run: Run) -> Iterator[str]:
    yield "| model | inputs | ratio | processor time | bound | calls | first answer |"
    yield "|---|---|---|---|---|---|---|"
    for each in _named(run, "zoo", "light"):
        found = {figure["name"]: figure for figure in each["figures"]}
        name = each["name"].partition(".")[2]
        for title, figure in found.items():
            if not title.endswith(AGAINST):
                continue
            what = title.removesuffix(AGAINST)
            first, used = found.get(f"{what}: first answer"), found.get(what + PROCESSOR)
            yield (
                f"| {name} | {what} | {number(figure['value'])} | {number(used['value']) if used else ''} | {kept(figure)} "
                f"| {_cell(figure['note'])} | {number(first['value']) + ' s: ' + _cell(first['note']) if first else ''} |"
            )
        if each["failed"]:
            yield f"| {name} | | failed | | | {_cell(each['failed'].splitlines()[-1])} | |"
    for each in _named(run, "summary"):
        for figure in each["figures"]:
            yield f"| | {_cell(figure['name'])} | {number(figure['value'])} | | {kept(figure)} | {_cell(figure['note'])} | |"


def _bounds(run: Run) -> Iterator[str]:
    for each in run["benchmarks"]:
        for figure in each["figures"]:
            if figure["bound"] is None:
                continue
            side = "at least" if figure["least"] else "at most"
            unit = f" {figure['unit']}" if figure["unit"] else ""
            yield (
                f"| `{each['name']}` | {_cell(figure['name'])} | {side} {figure['bound']:g}{unit} | {number(figure['value'])}{unit} "
                f"| {'' if figure['met'] else '**missed**'} |"
            )


def _operators(run: Run) -> Iterator[str]:
    for each in _named(run, "operators"):
        found = {figure["name"]: figure for figure in each["figures"]}
        rows = sorted(
            (figure for name, figure in found.items() if name.endswith(AGAINST)), key=lambda figure: -figure["value"]
        )
        yield from (
            f"### {each['name'].partition('.')[2]}".replace("_", " "),
            "",
            "| case | ratio | processor time | calls |",
            "|---|---|---|---|",
        )
        for figure in rows:
            what = figure["name"].removesuffix(AGAINST)
            used = number(found[what + PROCESSOR]["value"]) if what + PROCESSOR in found else ""
            yield f"| {_cell(what)} | {number(figure['value'])} | {used} | {_cell(figure['note'])} |"
        if each["failed"]:
            yield f"| failed | | | {_cell(each['failed'].splitlines()[-1])} |"
        yield ""


def _others(run: Run) -> Iterator[str]:
    for each in run["benchmarks"]:
        if each["name"].partition(".")[0] in ("zoo", "light", "operators", "summary"):
            continue
        yield from (f"### `{each['name']}`", "", each["title"], "")
        if each["figures"]:
            yield from ("| figure | measured | bound | |", "|---|---|---|---|")
        for figure in each["figures"]:
            unit = f" {figure['unit']}" if figure["unit"] else ""
            yield f"| {_cell(figure['name'])} | {number(figure['value'])}{unit} | {kept(figure)} | {_cell(figure['note'])} |"
        if each["skipped"] or each["failed"]:
            yield from (
                "",
                f"Skipped: {each['skipped']}" if each["skipped"] else f"Failed: `{each['failed'].splitlines()[-1]}`",
            )
        yield ""


def missed(run: Run) -> Sequence[str]:
    """The figures that miss their bounds, named."""
    return [
        f"{each['name']}: {figure['name']}"
        for each in run["benchmarks"]
        for figure in each["figures"]
        if not figure["met"]
    ]
