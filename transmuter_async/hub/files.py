"""Hit or download: the decision for one file of a load (docs/hub.md has it as a table).

A *hit* is content that is known to be right: by our record (`etag`), by hashing it now (`hash`), or unchecked where the Hub gives no hash
(`none`) or must not be asked (`offline`). Everything else is downloaded. What is there is replaced only by the complete, checked download.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
from pathlib import Path

from transmuter_async.hub.disk import Look
from transmuter_async.hub.download import Download
from transmuter_async.hub.errors import ChecksumError, EntryNotFoundError, LocalEntryNotFoundError
from transmuter_async.hub.events import Check
from transmuter_async.hub.listing import FileInfo, Listing
from transmuter_async.hub.load import Load
from transmuter_async.hub.names import check_file

__all__ = ["Files"]

_SIMILAR_LIMIT = 500  # names; looking for similar ones is slow
_logger = logging.getLogger("transmuter_async.hub")


class Files:
    """The files of one commit, for one load."""

    def __init__(self, load: Load, listing: Listing) -> None:
        self.listing = listing
        self._load = load
        self._asked = load.asked
        self._cache = load.cache
        self._workers = load.workers
        self._verify = load.verify

    def find(self, file: str) -> FileInfo:
        """What the listing says about a file. A complete listing needs no question to the Hub.

        Raises:
            InvalidReferenceError: The name is unsafe.
            EntryNotFoundError: The revision has no such file.
        """
        info = self.listing.files.get(check_file(file))
        if info is not None:
            return info
        if not self.listing.checked:
            return FileInfo()  # offline, from a snapshot folder: what is not there may exist on the Hub
        raise EntryNotFoundError(
            f"{self._asked.repo}@{self._asked.revision} (commit {self.listing.commit[:12]}) has no file {file!r}{_similar(file, self.listing)}.",
            repo=self._asked.repo,
            file=file,
        )

    async def obtain(self, file: str) -> Path:
        """The path of a file that is known to be right; exactly one hit or one download.

        Raises:
            HubError: It is not to be had.
        """
        info = self.find(file)
        pointer = self._cache.folder.pointer(self.listing.commit, file)
        look = await self._look(file)
        if self._load.environment.offline:
            await self._offline(file, info, look)
            return pointer
        check = await self._check(file, info, look)
        if check is not None:
            self._load.events.hit(file, look.size or 0, check)
            return pointer
        await self._exclusively(file, info)
        return pointer

    async def repair(self, file: str) -> bool:
        """For a file that turned out to be unusable: hashes it, and downloads it again when the hash is wrong.

        Returns:
            Whether it was wrong, and is now right.
        """
        info = self.find(file)
        if info.etag is None or self._load.environment.offline:
            return False
        if await self._right(file, info.etag):
            return False
        _logger.warning("%s/%s in the cache does not have its hash: it is downloaded again", self._asked.repo, file)
        async with self._load.locks.hold(self._cache.folder.lock(info.etag)):
            # Somebody else may have noticed it as well, and be done by now.
            if not await self._right(file, info.etag):
                await self._download(file, info)
        return True

    async def _look(self, file: str) -> Look:
        return await self._workers.run(self._cache.look, self.listing.commit, file)

    async def _offline(self, file: str, info: FileInfo, look: Look) -> None:
        if not look:
            known_absent = await self._workers.run(self._cache.has_no_exist_note, self.listing.commit, file)
            why = (
                "it is not in the repository"
                if known_absent
                else "it is not in the cache. Load it once with a connection"
            )
            raise LocalEntryNotFoundError(
                f"Offline, and {self._asked.repo}@{self._asked.revision}/{file} is not to be had: {why}.",
                repo=self._asked.repo,
                file=file,
            )
        check: Check = "offline"
        if self._verify == "always" and info.etag is not None:
            if not await self._right(file, info.etag):
                raise ChecksumError(
                    f"Offline, and {self._asked.repo}@{self._asked.revision}/{file} in the cache does not have the hash {info.etag}. "
                    "Load it once with a connection: it is then replaced.",
                    expected=info.etag,
                    actual="",
                )
            check = "hash"
        self._load.events.hit(file, look.size or 0, check)

    async def _check(self, file: str, info: FileInfo, look: Look) -> Check | None:
        """How the file at its place is known to be right, None when it is not."""
        if not look or (info.size is not None and look.size != info.size):
            return None
        if info.etag is None:
            return "none"
        known = look.recorded or (look.named if self._verify == "never" else None)
        if known == info.etag and self._verify != "always":
            return "etag"
        if known not in (None, info.etag):
            return None
        return "hash" if await self._right(file, info.etag) else None

    async def _right(self, file: str, etag: str) -> bool:
        """Hashes the file at its place, and records it when it is right."""
        return await self._workers.run_long(self._cache.verify_pointer, self.listing.commit, file, etag)

    async def _exclusively(self, file: str, info: FileInfo) -> None:
        """The file is missing or wrong: under its lock, somebody else may have brought it; else it is downloaded."""
        name = info.etag or hashlib.sha256(f"{self.listing.commit}/{file}".encode()).hexdigest()
        async with self._load.locks.hold(self._cache.folder.lock(name)):
            look = await self._look(file)
            check = await self._check(file, info, look) or await self._link(file, info)
            if check is not None:
                size = look.size if look.size is not None else info.size
                self._load.events.hit(file, size or 0, check)
                return
            if look:
                _logger.warning("%s/%s in the cache is not what the Hub has: it is replaced", self._asked.repo, file)
            await self._download(file, info)

    async def _link(self, file: str, info: FileInfo) -> Check | None:
        """The content may be there under its hash, with only the link missing; or in another commit, where there are no links."""
        if info.etag is None:
            return None
        try:
            return await self._link_content(file, info, info.etag)
        except FileNotFoundError:  # moved away by another writer, where locks do nothing
            return None

    async def _link_content(self, file: str, info: FileInfo, etag: str) -> Check | None:
        commit = self.listing.commit
        blob = await self._workers.run(self._cache.look_at_blob, etag)
        if blob and info.size in (None, blob.size):
            check: Check | None = "etag" if self._verify == "never" or blob.recorded else None
            if check is None or self._verify == "always":
                check = "hash" if await self._workers.run_long(self._cache.verify_blob, etag) else None
            if check is not None:
                await self._workers.run(self._cache.link, commit, file, etag)
                return check
        other = await self._workers.run(self._cache.find_elsewhere, etag, info.size, commit)
        if other is None:
            return None
        if self._verify == "always" and not await self._workers.run_long(self._cache.verify_file, other, etag):
            return None
        await self._workers.run(self._cache.adopt, commit, file, etag, other)
        return "hash" if self._verify == "always" else "etag"

    async def _download(self, file: str, info: FileInfo) -> None:
        with self._load.events.download(file) as span:
            span.measurements["bytes"] = await Download(
                self._load, self.listing.commit, file, info, self._load.events.progress(file, span)
            ).run()


def _similar(file: str, listing: Listing) -> str:
    if len(listing.files) > _SIMILAR_LIMIT:
        return ""
    close = difflib.get_close_matches(file, listing.files, n=3, cutoff=0.5)
    return f"; near to it are {', '.join(map(repr, close))}" if close else ""
