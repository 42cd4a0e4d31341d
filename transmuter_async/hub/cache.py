"""The metadata that is kept about one repository, and its cache on the disk.

The records are small JSON files, read through aiofiles in the client's own threads; everything else that blocks is in `disk.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

import aiofiles
import anyio

from transmuter_async.hub.disk import RepoDisk
from transmuter_async.hub.errors import InvalidReferenceError
from transmuter_async.hub.layout import RepoFolder
from transmuter_async.hub.listing import FileInfo, Listing, parse_official_tree, parse_saved
from transmuter_async.hub.names import check_file, is_commit
from transmuter_async.hub.workers import Workers

__all__ = ["RepoCache"]

_RECORD_LIMIT = 64 << 20
_logger = logging.getLogger("transmuter_async.hub")


class RepoCache(RepoDisk):
    """The cache of one repository, for one load."""

    def __init__(self, folder: RepoFolder, workers: Workers, *, symlinks: bool) -> None:
        super().__init__(folder, symlinks=symlinks)
        self._workers = workers

    async def saved_listing(self, revision: str, *, offline: bool) -> Listing | None:
        """The metadata that is saved for a revision; None when there is none.

        Ours first, even where another tool has moved the branch on since: it may have fetched a single file of a newer commit. Then
        what the official client keeps; offline also the bare snapshot folder, unchecked.
        """
        ref = None
        if is_commit(revision):
            commits = [revision]
        else:
            ref = await self._read_commit(self.folder.ref(revision))
            head = await self._read_commit(self.folder.head(revision))
            commits = [commit for commit in (head, ref) if commit is not None]
        for commit in commits:
            body = await self._read(self.folder.info(commit))
            listing = None if body is None else await self._workers.run(parse_saved, body, self.folder.repo, commit)
            if listing is not None:
                return listing
        last = ref if ref is not None else revision
        if not is_commit(last):
            return None
        body = await self._read(self.folder.tree(last))
        listing = None if body is None else await self._workers.run(parse_official_tree, body, self.folder.repo, last)
        if listing is not None or not offline:
            return listing
        return await self._workers.run(self._scan_snapshot, last)

    async def save_listing(self, listing: Listing, revision: str) -> None:
        """Keeps the metadata, and that the revision is at this commit now. A cache that can't be written is left as it is."""
        body = await self._read(self.folder.info(listing.commit))
        await self._workers.run(self._write_listing, listing, revision, body)

    async def knows_snapshot(self, revision: str) -> bool:
        """Whether a snapshot folder exists for the revision, whatever it holds."""
        commit = revision if is_commit(revision) else await self._read_commit(self.folder.ref(revision))
        return commit is not None and await self._workers.run((self.folder.snapshots / commit).is_dir)

    def has_no_exist_note(self, commit: str, file: str) -> bool:
        """Whether another tool noted that the commit has no such file."""
        return self.folder.no_exist(commit, file).exists()

    def _write_listing(self, listing: Listing, revision: str, saved: bytes | None) -> None:
        folder = self.folder
        known = saved is not None and parse_saved(saved, folder.repo, listing.commit) == listing
        try:
            self._prepare()
            if not known:
                self._write(folder.info(listing.commit), listing.dump(time.time()))
            # A ref without its snapshot folder is a corrupt repository for other tools.
            self._make_folder(folder.snapshots / listing.commit)
            if not is_commit(revision):
                self._write_commit(folder.head(revision), listing.commit)
                self._write_commit(folder.ref(revision), listing.commit)
        except OSError as error:
            _logger.debug("the metadata of %s is not kept: %s", folder.repo, error)

    def _write_commit(self, path: Path, commit: str) -> None:
        # One by one: where a branch `a` was, and `a/b` is now, the ref can't be written, and ours can.
        try:
            if self._commit_at(path) != commit:
                self._write(path, commit.encode())
        except OSError as error:
            _logger.debug("%s is not kept: %s", path, error)

    def _scan_snapshot(self, commit: str) -> Listing | None:
        root = self.folder.snapshots / commit
        files: dict[str, FileInfo] = {}
        for parent, _, names in os.walk(root):
            for name in sorted(names):
                path = Path(parent, name)
                with contextlib.suppress(InvalidReferenceError, OSError):
                    files[check_file(path.relative_to(root).as_posix())] = FileInfo(path.stat().st_size)
        return Listing(self.folder.repo, commit, files, checked=False) if files else None

    async def _read(self, path: Path) -> bytes | None:
        # Shielded, so that a cancellation never leaves an open file behind.
        with anyio.CancelScope(shield=True):
            try:
                async with aiofiles.open(path, "rb", executor=self._workers.executor) as file:
                    body: bytes = await file.read(_RECORD_LIMIT + 1)
            except (OSError, ValueError):
                return None
        return body if len(body) <= _RECORD_LIMIT else None

    async def _read_commit(self, path: Path) -> str | None:
        body = await self._read(path)
        text = "" if body is None else body[:64].decode("ascii", "replace").strip()
        return text if is_commit(text) else None
