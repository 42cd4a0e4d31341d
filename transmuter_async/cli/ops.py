"""List the operators that are implemented, by domain and version.

A word filters: `transmuter ops conv`. Exit code 1 when nothing matches.
"""

from __future__ import annotations

import argparse

from transmuter_async.cli.output import Output
from transmuter_async.operators import supported


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ops`."""
    parser.add_argument("word", nargs="?", default="", help="show operators whose name or domain holds this")
    parser.add_argument("--domain", help="show this domain alone; ai.onnx is the standard one")


async def execute(options: argparse.Namespace, output: Output) -> int:
    """Print the registry."""
    versions: dict[tuple[str, str], list[int]] = {}
    for each in supported():
        versions.setdefault((each.domain or "ai.onnx", each.name), []).append(each.since_version)
    word = options.word.lower()
    rows = [
        (domain, name, sorted(since))
        for (domain, name), since in sorted(versions.items())
        if word in name.lower() or word in domain
        if options.domain in (None, domain)
    ]
    output.data = {"operators": [{"domain": d, "name": n, "since_versions": v} for d, n, v in rows]}
    output.table(("domain", "operator", "since versions"), [(d, n, " ".join(map(str, v))) for d, n, v in rows])
    if output.terminal:
        output.line(f"{len(rows)} operators")
    return 0 if rows else 1
