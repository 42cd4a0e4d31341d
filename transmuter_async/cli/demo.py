"""Run the embedded classifier of digits: no network, no other file.

Loads the model, compiles it in an actor, lets 100 concurrent callers await it, twice, and shows digits beside the
answers, the accuracy, and what telemetry saw. `--backend trio` does the same on trio.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import numpy as np

from transmuter_async.cli.output import Output, seconds
from transmuter_async.compiler import Spec
from transmuter_async.demo import digits_model, digits_test
from transmuter_async.runtime import Runtime
from transmuter_async.telemetry import Event

SHADES = " ░▒▓█"
PLAIN_SHADES = " .:*#"
SHOWN = 6
LEAST_ACCURACY = 0.98


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `demo`."""
    parser.add_argument("--callers", type=int, default=100, metavar="N", help="concurrent callers (default 100)")


def drawn(image: np.ndarray, shades: str) -> list[str]:
    """An image, uint8 (8, 8) in 0 to 16, as eight lines of two characters a pixel."""
    levels = (image.astype(int) * (len(shades) - 1) + 8) // 16
    return ["".join(shades[level] * 2 for level in row) for row in levels]


def gallery(images: np.ndarray, answers: Sequence[str], shades: str) -> list[str]:
    """Digits side by side, with a line of text under each."""
    pictures = [drawn(image, shades) for image in images]
    lines = ["   ".join(rows) for rows in zip(*pictures, strict=True)]
    return [*lines, "   ".join(f"{answer:^16}" for answer in answers)]


def durations(events: Sequence[Event], name: str) -> list[int]:
    """Nanoseconds of every span `name` that ended well."""
    return sorted(int(event.measurements["duration"]) for event in events if event.name == f"{name}.stop")


def told(events: Sequence[Event]) -> dict[str, Any]:
    """What the events say: how often, how long, and where the time of the calls went."""
    counts = Counter(event.name for event in events)
    calls = durations(events, "transmuter.call")
    stops = [event.measurements for event in events if event.name == "transmuter.call.stop"]
    compiles = [
        event.measurements["duration"]
        for event in events
        if event.name == "transmuter.segment.compile.stop" and event.metadata["compiled"]
    ]
    return {
        "load_ns": sum(durations(events, "transmuter.load")),
        "compile_ns": sum(compiles),
        "programs": len(compiles),
        "calls": len(calls),
        "call_median_ns": calls[len(calls) // 2] if calls else 0,
        "call_longest_ns": calls[-1] if calls else 0,
        "queued_ns": sum(int(stop["queued"]) for stop in stops),
        "compiling_ns": sum(int(stop["compiling"]) for stop in stops),
        "working_ns": sum(calls) - sum(int(stop["queued"]) + int(stop["compiling"]) for stop in stops),
        "cache_hits": counts["transmuter.cache.hit"],
        "cache_misses": counts["transmuter.cache.miss"],
        "cache_evictions": counts["transmuter.cache.evict"],
        "breaks": counts["transmuter.break.stop"],
        "events": len(events),
    }


async def execute(options: argparse.Namespace, output: Output) -> int:
    """Load, compile, ask, tell. Exit code 1 when fewer than 98 % of the answers are right."""
    images, labels = await anyio.to_thread.run_sync(digits_test)
    source = await anyio.to_thread.run_sync(digits_model)
    pixels = images[:, None].astype(np.float32) / 16
    callers = max(1, min(options.callers, len(images)))
    shares = np.array_split(np.arange(len(images)), callers)  # of 4 and of 3 images: a kept shape, and one in the cache
    answers = np.zeros((len(images), 10), np.float32)
    events: list[Event] = []

    async with Runtime() as runtime, runtime.telemetry.subscribe("transmuter", buffer=100_000) as subscription:
        with output.working("loading and compiling the embedded model"):
            model = await runtime.load(source)
            compiled = await runtime.compile(model, {"image": Spec((len(shares[0]), 1, 8, 8), "float32")})

        async def caller(share: np.ndarray) -> None:
            found = await compiled.run({"image": pixels[share]})
            answers[share] = found["probabilities"]

        took = []
        for _ in ("cold", "warm"):  # one of the two shapes is compiled by the first callers who ask for it
            began = time.perf_counter_ns()
            async with anyio.create_task_group() as group:
                for share in shares:
                    group.start_soon(caller, share)
            took.append(time.perf_counter_ns() - began)
        await compiled.aclose()
        while True:
            try:
                events.append(subscription.receive_nowait())
            except anyio.WouldBlock:
                break

    right = answers.argmax(-1) == labels
    accuracy = float(right.mean())
    facts = told(events)
    output.data = {
        "backend": options.backend,
        "images": len(images),
        "callers": callers,
        "accuracy": accuracy,
        "cold_ns": took[0],
        "warm_ns": took[1],
        "telemetry": facts,
        "wrong": [{"label": labels[i], "answer": answers[i].argmax()} for i in np.flatnonzero(~right)],
    }
    show(output, images, answers, right, facts)
    return 0 if accuracy >= LEAST_ACCURACY else 1


def show(
    output: Output, images: np.ndarray, answers: np.ndarray, right: np.ndarray, facts: Mapping[str, Any]
) -> None:
    """The gallery (a wrong answer among it, where there is one) and the tables."""
    chosen = [*np.flatnonzero(right)[: SHOWN - 1], *np.flatnonzero(~right)[:1]][:SHOWN]
    words = [f"{answers[i].argmax()} ({answers[i].max():.0%}){'' if right[i] else ' ✗'}" for i in chosen]
    shades = SHADES if output.terminal else PLAIN_SHADES
    for line in gallery(images[chosen], words, shades):
        output.line(line.rstrip())
    data = output.data
    output.line()
    output.heading(f"{int(right.sum())} of {len(right)} digits are right: accuracy {data['accuracy']:.2%}")
    output.line(
        f"{data['callers']} concurrent callers on {data['backend']}: all answered after {seconds(data['cold_ns'])}; "
        f"again, with everything compiled, after {seconds(data['warm_ns'])}"
    )
    output.line()
    output.heading("what telemetry saw")
    output.fields(
        {
            "load": seconds(facts["load_ns"]),
            "compile": f"{seconds(facts['compile_ns'])} in {facts['programs']} programs",
            "calls": f"{facts['calls']}, median {seconds(facts['call_median_ns'])}, "
            f"longest {seconds(facts['call_longest_ns'])}",
            "cache": f"{facts['cache_hits']} hits, {facts['cache_misses']} misses, "
            f"{facts['cache_evictions']} evictions (calls of the shape given to compile need no cache)",
            "breaks": facts["breaks"],
        }
    )
    output.line()
    output.heading("where the time of the calls went (added up over the callers)")
    total = max(1, facts["queued_ns"] + facts["compiling_ns"] + facts["working_ns"])
    output.fields(
        {
            name: f"{facts[key] / total:6.1%}  {seconds(facts[key])}"
            for name, key in (("waiting", "queued_ns"), ("compiling", "compiling_ns"), ("working", "working_ns"))
        }
    )
