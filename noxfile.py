"""The project's chores. `nox -l` lists them; `nox -s lint types tests` is what a change needs."""

from __future__ import annotations

from pathlib import Path

import nox

nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
ENVIRONMENT = {"JAX_PLATFORMS": "cpu"}
SOURCES = ["transmuter_async", "tests", "examples", "noxfile.py"]
LONGEST_FILE = 600


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's rules."""
    session.install("ruff>=0.12")
    session.run("ruff", "check", *SOURCES)


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict, over the package and the examples."""
    session.install("-e", ".[dev]")
    session.run("mypy")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """The test suite, on asyncio, uvloop and trio. Arguments go to pytest."""
    session.install("-e", ".[test]")
    session.run("python", "-m", "pytest", *(session.posargs or ["-n", "2"]), env=ENVIRONMENT)


@nox.session
def conformance(session: nox.Session) -> None:
    """Every case of the installed onnx, on the host and compiled; fails when the table of exceptions grew."""
    session.install("-e", ".[test]")
    session.run("python", "-m", "tests.conformance.suite", *session.posargs, env=ENVIRONMENT)


@nox.session
def docs(session: nox.Session) -> None:
    """The code blocks of README and docs run, then the pages are built; any warning fails."""
    session.install("-e", ".[test,docs]")
    session.run("python", "-m", "pytest", "tests/test_docs.py", env=ENVIRONMENT)
    session.run("sphinx-build", "-n", "-W", "-b", "html", "docs", "docs/_build/html")


@nox.session
def examples(session: nox.Session) -> None:
    """Every example runs."""
    session.install("-e", ".[test]")
    session.run("python", "-m", "pytest", "tests/test_examples.py", *session.posargs, env=ENVIRONMENT)


@nox.session
def bench(session: nox.Session) -> None:
    """Figures of time and memory; `-- --check` holds them to their bounds, `-- --json FILE` keeps them, `-- --quick` is a short run."""
    session.install("-e", ".[test]")
    session.run("python", "-m", "tests.benchmarks", *session.posargs, env=ENVIRONMENT)


@nox.session
def wheel(session: nox.Session) -> None:
    """The built wheel, installed alone and away from the sources, runs the demo on both loops."""
    session.install(".")
    session.chdir(session.create_tmp())
    session.run("transmuter", "demo", env=ENVIRONMENT)
    session.run("transmuter", "demo", "--backend", "trio", env=ENVIRONMENT)


@nox.session
def train_digits(session: nox.Session) -> None:
    """Train the embedded classifier anew, into the session's folder, and tell its accuracy."""
    session.install("-e", ".[test]")
    session.run("python", "examples/train_digits.py", session.create_tmp(), env=ENVIRONMENT)


@nox.session(python=False)
def size(session: nox.Session) -> None:
    """Lines per file of the package, longest first; a file over 600 lines needs a reason."""
    files = sorted(Path("transmuter_async").rglob("*.py"))
    lines = {file: len(file.read_text("utf-8").splitlines()) for file in files}
    for file, count in sorted(lines.items(), key=lambda item: -item[1]):
        session.log(f"{count:6} {file}{'   <- over ' + str(LONGEST_FILE) if count > LONGEST_FILE else ''}")
    session.log(f"{sum(lines.values()):6} in {len(lines)} files")
