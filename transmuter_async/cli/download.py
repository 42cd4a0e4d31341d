"""Download files of a Hugging Face repository into the cache that all its tools share.

  transmuter download org/name 'onnx/model.onnx*' '*.json'
  transmuter download org/name --list

Patterns choose files, none means all; --list shows the ONNX files, their precision and size. Prints where the files lie.
"""

from __future__ import annotations

import argparse

from transmuter_async.cli.output import Output, size
from transmuter_async.cli.progress import downloads
from transmuter_async.runtime import Runtime


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `download`."""
    parser.add_argument("repository", help="owner/name on the Hub, or a local folder")
    parser.add_argument("files", nargs="*", help="names and patterns")
    parser.add_argument("--revision", default="main", help="branch, tag, refs/pr/N or commit (default main)")
    parser.add_argument("--list", action="store_true", help="show the ONNX files, download nothing")
    parser.add_argument("--anonymous", action="store_true", help="do not send the user's token")


async def execute(options: argparse.Namespace, output: Output) -> int:
    """List or download."""
    token = False if options.anonymous else None
    async with Runtime() as runtime:
        if options.list:
            variants = await runtime.variants(options.repository, revision=options.revision, token=token)
            output.data = {"variants": [{name: getattr(each, name) for name in each.__slots__} for each in variants]}
            rows = [
                (each.file, each.precision, "?" if each.size is None else size(each.size + each.data_size))
                for each in variants
            ]
            output.table(("file", "precision", "size"), rows, right=("size",))
            return 0
        async with downloads(runtime.telemetry, output, options.repository):
            paths = await runtime.download(
                options.repository, options.files or None, revision=options.revision, token=token
            )
    output.data = {"files": {name: str(path) for name, path in paths.items()}}
    output.table(("file", "path"), paths.items())
    return 0
