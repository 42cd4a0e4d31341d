"""One file from the Hub into the cache: attempts, resuming, and the checks before it gets its name.

Every attempt starts at the Hub's `resolve` address, since a signed CDN link expires. An attempt that finds bytes already written asks for
the rest; whether the rest belongs to them is decided by the hash at the end, not by what the server says.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from urllib.parse import quote

from transmuter_async.hub.answers import content_start, error_of, read_facts
from transmuter_async.hub.errors import (
    ChecksumError,
    FileTooLargeError,
    HubConnectionError,
    HubConsistencyError,
    HubError,
    HubHTTPError,
)
from transmuter_async.hub.events import Progress
from transmuter_async.hub.listing import FileInfo
from transmuter_async.hub.load import Load
from transmuter_async.hub.partial import Partial
from transmuter_async.hub.retry import Retries
from transmuter_async.hub.transport import ERROR_BODY_LIMIT, Answer, Exchange
from transmuter_async.hub.workers import Hop

__all__ = ["Download"]

_BATCH = 1 << 20  # bytes per thread hop
_LARGEST = 50 * 10**9  # the Hub's limit for plain HTTP
_WASTED = "the file was written again from the start"
_logger = logging.getLogger("transmuter_async.hub")


class Download:
    """The download of one file. The caller holds its lock."""

    def __init__(self, load: Load, commit: str, file: str, info: FileInfo, progress: Progress) -> None:
        asked = load.asked
        self._asked = replace(asked, file=file)
        self._file = file
        self._commit = commit
        self._info = info
        self._cache = load.cache
        self._transport = load.transport
        self._workers = load.workers
        self._retries = Retries(load.sleep)
        self._timeout = load.environment.download_timeout
        self._progress = progress
        self._stated_size: int | None = None
        self._url = f"{asked.endpoint}/{asked.repo}/resolve/{commit}/{quote(file)}"

    async def run(self) -> int:
        """Brings the file into the cache.

        Returns:
            Its size in bytes.

        Raises:
            HubError: It can't be had, or is not what the metadata says.
        """
        if self._info.size is not None and self._info.size > _LARGEST:
            raise FileTooLargeError(
                f"{self._asked} has {self._info.size} bytes; the Hub serves at most {_LARGEST} over plain HTTP. "
                "Download it with the `hf` tool, then load it from the cache."
            )
        try:
            return await self._into_place()
        except FileNotFoundError:
            _logger.warning("another process has taken over the partial file of %s: %s", self._asked, _WASTED)
            try:
                return await self._into_place()
            except FileNotFoundError as error:
                raise HubConsistencyError(
                    f"{self._asked}: other processes keep taking the partial file away."
                ) from error

    async def _into_place(self) -> int:
        """One partial file, from its making to its final name, or to its end."""
        await self._workers.run(self._cache.prepare_download, self._commit, self._file)
        partial = Partial(self._cache.folder.blobs, self._info.etag, self._info.size)
        keep = True
        try:
            await self._workers.run_long(partial.open)
            self._warn_about_space(partial.size, await self._workers.run(partial.free_space), partial.position)
            await self._fill(partial)
            return await self._workers.run(self._publish, partial)
        except HubError as error:
            # A cut or an answer with an error says nothing against the bytes before it; everything else does.
            keep = isinstance(error, HubConnectionError | HubHTTPError)
            raise
        finally:
            await self._workers.run(lambda: partial.leave(keep=keep))

    async def _fill(self, partial: Partial) -> None:
        """Attempts until the content is complete and right."""
        second = False
        farthest = partial.position
        while True:
            try:
                await self._attempt(partial)
                await self._workers.run_long(partial.check)
                return
            except ChecksumError as error:
                await self._workers.run(partial.restart)
                if second:
                    raise ChecksumError(
                        f"{self._asked}: {error} Two downloads were wrong; a proxy may be changing them.",
                        expected=error.expected,
                        actual=error.actual,
                    ) from error
                second = True
                _logger.warning("%s: %s It is downloaded again.", self._asked, error)
            except HubError as error:
                # Only what no attempt has reached: a server that starts again each time must not go on for ever.
                if partial.position > farthest:
                    farthest = partial.position
                    self._retries.progress()
                await self._workers.run(partial.touch)
                await self._retries.wait(error)

    async def _attempt(self, partial: Partial) -> None:
        """From the position of `partial` to the end, or to a failure."""
        if partial.position and partial.position == partial.size:
            return  # all of it was there already
        for start in dict.fromkeys((partial.position, 0)):
            if start != partial.position:
                await self._workers.run(partial.restart)
            headers = {"Accept-Encoding": "identity"}
            if start:
                headers["Range"] = f"bytes={start}-"
            async with self._transport.get(
                self._url, timeout=self._timeout, headers=headers, inspect=self._inspect
            ) as exchange:
                if await self._receive(exchange, partial, start):
                    return
        raise HubConsistencyError(f"{self._asked}: the server sends a part of the file where the whole was asked for.")

    def _inspect(self, answer: Answer) -> None:
        """Compares what the Hub's own answers state with the metadata, before a byte of a body is read."""
        if answer.from_hub:
            stated = read_facts(answer.status, answer.headers)
            stated.check(self._asked, self._commit, self._info)
            self._stated_size = stated.size if self._stated_size is None else self._stated_size

    async def _receive(self, exchange: Exchange, partial: Partial, start: int) -> bool:
        """Takes an answer. False: it does not continue what is there, ask for the whole."""
        last = exchange.answer
        if last.status == 416 and start:
            return False
        if last.status not in (200, 206):
            body, _ = await exchange.read(ERROR_BODY_LIMIT)
            raise error_of(last.status, last.headers, body, self._asked, from_hub=last.from_hub, now=time.time())
        position = content_start(last.status, last.headers, start, self._info.size)
        if position is None:
            return False
        if position != start:
            await self._workers.run(partial.restart)
        if partial.size is None:
            size = self._stated_size
            if size is None:  # nothing of the Hub's own: then the length that the CDN states
                size = read_facts(last.status, last.headers).size
            await self._workers.run(partial.expect, size)
        await self._stream(exchange, partial)
        if partial.size is not None and partial.position < partial.size:
            raise HubConnectionError(
                f"{self._asked}: the answer ended after {partial.position} of {partial.size} bytes."
            )
        return True

    async def _stream(self, exchange: Exchange, partial: Partial) -> None:
        """Body → disk and hash: one thread hop per MiB, while the next MiB is being received."""
        batch: list[bytes] = []
        length = 0
        received = partial.position
        limit = _LARGEST if partial.size is None else partial.size
        hop: Hop[None] | None = None
        try:
            while chunk := await exchange.receive():
                batch.append(chunk)
                length += len(chunk)
                received += len(chunk)
                if received > limit:
                    raise HubConsistencyError(
                        f"{self._asked}: the server sends more than the {limit} bytes that the file may have."
                    )
                if length >= _BATCH:
                    if hop is not None:
                        await hop.result()
                    hop = self._workers.start(partial.write, batch)
                    batch, length = [], 0
                    self._progress(partial.position, partial.size)
        except HubConnectionError:
            await self._flush(partial, hop, batch)  # what came before the cut need not come again
            raise
        else:
            await self._flush(partial, hop, batch)
            self._progress(partial.position, partial.size)
        finally:
            if hop is not None:
                await hop.result()

    async def _flush(self, partial: Partial, hop: Hop[None] | None, batch: list[bytes]) -> None:
        if hop is not None:
            await hop.result()
        await self._workers.run(partial.write, batch)

    def _publish(self, partial: Partial) -> int:
        """Names the content. Runs in a worker thread."""
        etag, pointer = self._info.etag, self._cache.folder.pointer(self._commit, self._file)
        size = partial.position
        if etag is None:
            partial.publish(pointer)
        else:
            partial.publish(self._cache.folder.blob(etag))
            self._cache.settle(self._commit, self._file, etag)
        return size

    def _warn_about_space(self, size: int | None, free: int | None, have: int) -> None:
        # Only a warning: what quotas and network file systems say is not to be relied on.
        if size is not None and free is not None and free < size - have:
            _logger.warning(
                "%s needs %d more bytes, and %s has %d free: trying all the same",
                self._asked,
                size - have,
                self._cache.folder.cache,
                free,
            )
