"""Sphinx: Markdown pages, no autodoc; warnings are errors (`nox -s docs`)."""

from __future__ import annotations

project = "transmuter_async"
extensions = ["myst_parser"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "alabaster"
