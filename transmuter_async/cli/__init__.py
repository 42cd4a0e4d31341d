"""The `transmuter` command: a file per subcommand, each with a parser and a coroutine.

`app.py` has the list of commands, the exit codes and how errors are told; `output.py` what a terminal, a pipe and
`--json` get; `inputs.py` what `--input` understands.
"""

from __future__ import annotations

from transmuter_async.cli.app import main

__all__ = ["main"]
