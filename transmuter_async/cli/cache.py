"""Look at the Hugging Face cache, check it, and clean it.

  transmuter cache ls [REPOSITORY]
  transmuter cache verify [REPOSITORY]      hashes every file; exit code 1 when one is wrong
  transmuter cache rm REPOSITORY [--revision REVISION]
  transmuter cache path [REPOSITORY [FILE]]
"""

from __future__ import annotations

import argparse
from typing import Any

import anyio

from transmuter_async.cli.output import Output, size
from transmuter_async.hub import Stop, cache_path, list_cache, remove_from_cache, verify_cache


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `cache`."""
    parser.add_argument("action", choices=("ls", "verify", "rm", "path"))
    parser.add_argument("repository", nargs="?", help="owner/name")
    parser.add_argument("file", nargs="?", help="a file of it (path)")
    parser.add_argument("--revision", help="branch, tag or commit (rm and path)")


async def execute(options: argparse.Namespace, output: Output) -> int:
    """The work blocks, so it has a thread."""
    action = options.action
    # What would be passed over is refused: `rm REPOSITORY FILE` must not remove all of the repository.
    if options.file is not None and action != "path":
        output.problem(f"cache {action} takes no file; {options.file!r} was given")
        return 2
    if options.revision is not None and (action not in ("rm", "path") or options.repository is None):
        output.problem("--revision goes with cache rm or cache path, and a repository")
        return 2
    if action == "verify":
        stop = Stop()
        try:  # hashing may take minutes, and an interrupt must not wait for its end
            return await anyio.to_thread.run_sync(_verify, options, output, stop, abandon_on_cancel=True)
        finally:
            stop.set()
    return await anyio.to_thread.run_sync({"ls": _ls, "rm": _rm, "path": _path}[action], options, output)


def _ls(options: argparse.Namespace, output: Output) -> int:
    repos = list_cache(repo=options.repository)
    output.data = {
        "cache": str(cache_path()),
        "repositories": [
            {
                "repo": repo.repo,
                "folder": repo.folder,
                "size": repo.size,
                "partial": repo.partial,
                "revisions": [
                    {
                        "commit": revision.commit,
                        "refs": revision.refs,
                        "files": [_row(file) for file in revision.files],
                    }
                    for revision in repo.revisions
                ],
            }
            for repo in repos
        ],
    }
    if options.repository is None:
        rows = [
            (repo.repo, size(repo.size), " ".join(ref for each in repo.revisions for ref in each.refs)) for repo in repos
        ]
        output.table(("repository", "size", "revisions"), rows, right=("size",))
        output.line(f"{len(repos)} repositories, {size(sum(repo.size for repo in repos))} in {cache_path()}")
        return 0
    for repo in repos:
        for revision in repo.revisions:
            output.heading(" ".join((revision.commit, *revision.refs)))
            files = [(each.file, size(each.size), "yes" if each.checked else "no") for each in revision.files]
            output.table(("file", "size", "checked"), files, right=("size",))
    return 0


def _row(file: Any) -> dict[str, Any]:
    return {name: getattr(file, name) for name in ("file", "size", "etag", "checked")}


def _verify(options: argparse.Namespace, output: Output, stop: Stop) -> int:
    with output.working("hashing"):
        results = verify_cache(repo=options.repository, stop=stop)
    wrong = [each for each in results if each.result == "wrong"]
    output.data = {"results": [{"repo": r.repo, "file": r.file, "path": r.path, "result": r.result} for r in results]}
    output.table(("repository", "file", "result"), [(each.repo, each.file, each.result) for each in results])
    output.line(f"{len(results)} files, {len(wrong)} wrong")
    return 1 if wrong else 0


def _rm(options: argparse.Namespace, output: Output) -> int:
    if options.repository is None:
        output.problem("cache rm needs a repository; there is no command that removes all")
        return 2
    removed = remove_from_cache(options.repository, options.revision)
    output.data = {"size": removed.size, "files": removed.files, "kept": removed.kept}
    kept = f", {removed.kept} kept because they are being loaded" if removed.kept else ""
    output.line(f"{removed.files} files removed, {size(removed.size)} freed{kept}")
    return 0


def _path(options: argparse.Namespace, output: Output) -> int:
    extra = {} if options.revision is None else {"revision": options.revision}
    path = cache_path(options.repository, options.file, **extra)
    output.data = {"path": str(path)}
    output.line(str(path))
    return 0
