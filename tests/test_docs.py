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


def test_the_index_lists_every_page() -> None:
    text = (ROOT / "docs" / "index.md").read_text("utf-8")
    listed = text.partition("```{toctree}")[2].partition("```")[0].split()
    for page in (ROOT / "docs").glob("*.md"):
        if page.name != "index.md":
            assert page.stem in listed, f"{page.name} is not in the table of contents"
            assert f"]({page.name})" in text, f"{page.name} has no line that says what it is about"


def test_the_design_names_files_that_exist() -> None:
    """A file that is split or renamed is told where the layers are explained."""
    package = ROOT / "transmuter_async"
    text = (ROOT / "docs" / "design.md").read_text("utf-8")
    named = re.findall(r"`([a-z_]+(?:/[a-z_]+)?\.py)`", text)
    assert named
    for name in named:
        found = [*package.glob(name), *package.glob(f"*/{name}"), *ROOT.glob(name)]
        assert found, f"design.md names {name}, which does not exist"
    for stem in re.findall(r"`(axes_[a-z]+)`", text):
        assert (package / "compiler" / f"{stem}.py").exists(), stem
    for rules in (package / "compiler").glob("axes_*.py"):
        assert f"`{rules.stem}`" in text, f"design.md does not say what {rules.name} is for"
    for folder in package.iterdir():
        if (folder / "__init__.py").exists() and folder.name != "demo":
            assert f"| `{folder.name}` |" in text, f"design.md has no line for {folder.name}"


def test_what_can_never_happen_is_held_by_tests_that_exist() -> None:
    page = (ROOT / "docs" / "never-wrong.md").read_text("utf-8")
    sources = {file: file.read_text("utf-8") for file in (ROOT / "tests").rglob("*.py")}
    held = [name for name in re.findall(r"`([^`\s]+)`", page) if name.startswith(("tests/", "test_"))]
    assert len(held) > 20
    for name in held:
        file, _, function = name.rpartition("::") if "::" in name else (name, "", "")
        if file.endswith(".py") or "/" in file:
            found = (ROOT / file).exists() if "/" in file else any(each.name == file for each in sources)
            assert found, f"there is no {file}"
        else:
            function = file
        assert not function or any(f"def {function}(" in text for text in sources.values()), f"there is no {function}"
