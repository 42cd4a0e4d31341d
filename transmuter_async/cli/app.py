"""The parser, the exit codes, and how an error is told."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

import anyio

from transmuter_async.cli import bench, cache, compare, demo, download, explain, inspect, ops, profile, run
from transmuter_async.cli.output import Output
from transmuter_async.errors import (
    DeadlineExceeded,
    HubError,
    InputError,
    InvalidModel,
    TransmuterError,
    UnsupportedModel,
)
from transmuter_async.version import __version__

__all__ = ["EXIT_CODES", "main", "parser"]

COMMANDS: tuple[ModuleType, ...] = (run, inspect, explain, compare, profile, bench, download, cache, ops, demo)

OK, NO, USAGE, MODEL, INPUT, HUB, ERROR, BUG, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 70, 130
EXIT_CODES = {
    OK: "done",
    NO: "done, and the answer is no (a check or comparison failed)",
    USAGE: "wrong options",
    MODEL: "not a usable model, or one that needs what is not implemented",
    INPUT: "inputs that do not fit the graph, or a file that can't be read or written",
    HUB: "the Hugging Face Hub, its cache, or the network",
    ERROR: "another error of the library",
    BUG: "a mistake of ours: please report it with the output of -v",
    INTERRUPTED: "interrupted",
}


def parser() -> argparse.ArgumentParser:
    """The whole command line. Options that all commands share stand behind the command's name."""
    codes = "\n".join(f"  {code:>3}  {text}" for code, text in EXIT_CODES.items())
    top = argparse.ArgumentParser(
        prog="transmuter",
        description="Run ONNX models on JAX, and see where the time goes.",
        epilog=f"exit codes:\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"transmuter {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    shared = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    shared.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    shared.add_argument("-v", "--verbose", action="store_true", help="show the traceback of an error")
    shared.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio", help="event loop to run on")
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        words = str(module.__doc__).strip()
        command = commands.add_parser(
            name,
            parents=[shared],
            help=words.splitlines()[0].rstrip("."),
            description=words,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.set_defaults(command=module.execute, command_name=name)
    return top


def exit_code(error: BaseException) -> int:
    """The exit code that stands for `error`."""
    if isinstance(error, (InvalidModel, UnsupportedModel)):
        return MODEL
    if isinstance(error, (InputError, OSError)) and not isinstance(error, (HubError, DeadlineExceeded)):
        return INPUT
    if isinstance(error, HubError):
        return HUB
    if isinstance(error, TransmuterError):
        return ERROR
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return BUG


def single(error: BaseException) -> BaseException:
    """What is inside a group of one, however deep: a task group wraps the error that ended it."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Without the program's name; None takes those of the process.

    Returns:
        The exit code, see `EXIT_CODES`.
    """
    options = parser().parse_args(arguments)
    output = Output(json=options.json)
    try:
        code: int = anyio.run(options.command, options, output, backend=options.backend)
        output.flush()
    except BrokenPipeError:  # `transmuter ops | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except BaseException as wrapped:
        error = single(wrapped)
        if isinstance(error, SystemExit):
            raise error from None
        code = exit_code(error)
        if options.verbose:
            traceback.print_exception(wrapped)
        if code == INTERRUPTED:
            output.problem("interrupted")
        elif code == BUG and not options.verbose:
            output.problem(f"{type(error).__name__}: {error}\nThis should not happen; -v shows where it did.")
        else:
            output.problem(str(error) or type(error).__name__, kind=type(error).__name__)
    return code
