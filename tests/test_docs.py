"""Every Python block of README and docs runs, page by page, on both loops; links between the pages lead somewhere."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import anyio
import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|#)(?P<target>[^)#\s]+)[^)]*\)")


def blocks(page: Path) -> list[tuple[int, str]]:
    """Line and code of the page's Python blocks."""
    text = page.read_text("utf-8")
    return [
        (text.count("\n", 0, match.start("code")), match["code"])
        for match in BLOCK.finditer(text)
        if match["info"].strip() == "python"
    ]


def run(code: str, line: int, page: Path, names: dict[str, Any], backend: str) -> None:
    """Execute a block; one with `await` at its top level runs in a loop."""
    compiled = compile("\n" * line + code, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if not compiled.co_flags & inspect.CO_COROUTINE:
        exec(compiled, names)
        return

    async def main() -> None:
        await eval(compiled, names)

    anyio.run(main, backend=backend)


@pytest.mark.compiles_itself  # README jits `apply`
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_blocks_run(page: Path, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for line, code in blocks(page):
        run(code, line, page, names, backend)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [m["target"] for m in LINK.finditer(page.read_text("utf-8")) if not (page.parent / m["target"]).exists()]
    assert not missing


def test_every_fence_says_what_it_is() -> None:
    """A block without a language would be neither run nor noticed."""
    for page in PAGES:
        for match in BLOCK.finditer(page.read_text("utf-8")):
            info = match["info"].strip()
            assert info in {"python", "sh", "text"} or info.startswith("{"), f"{page.name}: ```{info}"


def test_the_readme_has_both_commands() -> None:
    """One line each, to paste on a new machine; .ci/run takes the second from here."""
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert any(line.startswith("python3 -m venv") and line.endswith("&& transmuter demo") for line in lines)
    assert sum(line.startswith("python3 -m venv") and "pytest" in line for line in lines) == 1
