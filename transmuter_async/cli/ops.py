"""List the operators that are implemented: versions, dtypes, and what has to be known on the host.

A word filters: `transmuter ops conv`. `--markdown` prints the page docs/operators.md. Exit code 1 when nothing matches.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from transmuter_async.cli.output import Output
from transmuter_async.graph import element_types
from transmuter_async.operators import Operator, supported

STANDARD = "ai.onnx"

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("float", ("float16", "float", "double")),
    ("int", ("int8", "int16", "int32", "int64")),
    ("uint", ("uint8", "uint16", "uint32", "uint64")),
    ("float8", ("float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz", "float8e8m0")),
    ("int4", ("int4", "uint4")),
    ("int2", ("int2", "uint2")),
    ("complex", ("complex64", "complex128")),
)
"""Words for several dtypes at once; a group of which some are missing is written out."""

INTRODUCTION = f"""# Operators

Written by `transmuter ops --markdown`; a test fails when it is stale.

An operator is in here once, whatever the number of its versions: `versions` are those at which its meaning or signature
changes, and there is a definition for each. `dtypes` are those of the newest version, inputs and outputs together, as the
standard lists them (com.microsoft has no list here). {"; ".join(f"`{word}` is {', '.join(names)}" for word, names in GROUPS)}.

How a node runs:

- *traced*: inside of an XLA program, whatever its inputs are.
- *static*: inside of a program, and the named inputs are known when it is compiled: constants, shapes, or values that become
  part of the program's key. Where they are computed from other things on the device, the program ends before the node.
- *host*: in numpy, between two programs, unless all of its inputs are known beforehand. These are operators of strings, maps and
  images, and those whose output shape depends on values.

Any operator over strings runs on the host, also one that is traced for numbers (Cast to and from strings, LabelEncoder).
Sequences and optionals are rearranged while tracing. If compiles both branches where they agree in structure, shapes and
dtypes; Loop and Scan are compiled where what they carry keeps its shape; else their condition or count is needed on the host.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One operator: how it stands in the table."""

    domain: str
    name: str
    versions: tuple[int, ...]
    dtypes: tuple[str, ...]
    runs: str
    notes: str


def rows() -> list[Row]:
    """Every operator, by domain and name."""
    found: dict[tuple[str, str], list[Operator]] = {}
    for each in supported():
        found.setdefault((each.domain, each.name), []).append(each)
    return [_row(*key, definitions) for key, definitions in sorted(found.items())]


def _row(domain: str, name: str, definitions: list[Operator]) -> Row:
    newest = definitions[-1]
    runs = "host" if newest.host else "traced"
    if newest.static:
        runs = "static: " + ", ".join(each for each in newest.inputs if each in newest.static)
    text = (inspect.getdoc(newest.function) or "").partition("\n\n")[0].replace("\n", " ")
    return Row(
        domain or STANDARD,
        name,
        tuple(each.since_version for each in definitions),
        tuple(_dtypes(element_types(domain, name, 1000 if domain != "com.microsoft" else 1))),
        runs,
        " ".join(filter(None, (text, newest.notes))),
    )


def _dtypes(types: Iterable[str]) -> Iterator[str]:
    """Types as ONNX writes them, in few words."""
    tensors = {each[len("tensor(") : -1] for each in types if each.startswith("tensor(")}
    for word, names in GROUPS:
        if tensors.issuperset(names):
            yield word
            tensors.difference_update(names)
    yield from sorted(tensors)
    kinds = {each.partition("(")[0] for each in types} - {"tensor"}
    yield from sorted({"seq": "sequence"}.get(kind, kind) for kind in kinds)


def markdown() -> str:
    """The page docs/operators.md."""
    lines = [INTRODUCTION]
    everything = rows()
    for domain in dict.fromkeys(each.domain for each in everything):
        listed = [each for each in everything if each.domain == domain]
        lines.append(f"## {domain}\n\n{len(listed)} operators.\n")
        lines.append("| operator | versions | dtypes | runs | notes |\n|---|---|---|---|---|")
        for each in listed:
            cells = (each.name, " ".join(map(str, each.versions)), ", ".join(each.dtypes), each.runs, each.notes)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ops`."""
    parser.add_argument("word", nargs="?", default="", help="show operators whose name or domain holds this")
    parser.add_argument("--domain", help="show this domain alone; ai.onnx is the standard one")
    parser.add_argument("--markdown", action="store_true", help="print the whole list as a page")


async def execute(options: argparse.Namespace, output: Output) -> int:
    """Print the registry."""
    if options.markdown:
        print(markdown(), end="")
        return 0
    word = options.word.lower()
    found = [
        each
        for each in rows()
        if word in each.name.lower() or word in each.domain
        if options.domain in (None, each.domain)
    ]
    output.data = {
        "operators": [
            {
                "domain": each.domain,
                "name": each.name,
                "since_versions": each.versions,
                "dtypes": each.dtypes,
                "runs": each.runs,
                "notes": each.notes,
            }
            for each in found
        ]
    }
    output.table(
        ("domain", "operator", "since versions", "runs"),
        [(each.domain, each.name, " ".join(map(str, each.versions)), each.runs) for each in found],
    )
    if output.terminal:
        output.line(f"{len(found)} operators")
    return 0 if found else 1
