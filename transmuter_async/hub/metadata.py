"""The metadata of a load: from the Hub, or what is saved where that suffices or has to suffice.

    offline               saved metadata or an error; no event
    pinned and saved      saved metadata; no event
    otherwise             a `hub.info` span around the request
       it succeeds        saved for next time; result "fetched"
       it fails, saved    a warning that names the error; result "saved"
       it fails, none     the error

"Fails" means any error, also a branch that was deleted: what worked yesterday from the cache works today, and says so. With saved metadata
there is one attempt and no waiting.
"""

from __future__ import annotations

import logging
import time
from urllib.parse import quote, urljoin

from transmuter_async.hub.answers import error_of, next_page
from transmuter_async.hub.errors import (
    HubConnectionError,
    HubConsistencyError,
    HubError,
    HubHTTPError,
    LocalEntryNotFoundError,
)
from transmuter_async.hub.listing import FileInfo, Listing, parse_info, parse_tree_page
from transmuter_async.hub.load import Load
from transmuter_async.hub.names import is_commit
from transmuter_async.hub.retry import LIMIT, Retries
from transmuter_async.hub.transport import ERROR_BODY_LIMIT, LISTING_LIMIT, origin_of

__all__ = ["Metadata"]

_PAGES_LIMIT = 10_000
_logger = logging.getLogger("transmuter_async.hub")


class Metadata:
    """Finds the listing for one load."""

    def __init__(self, load: Load) -> None:
        self._asked = load.asked
        self._cache = load.cache
        self._events = load.events
        self._transport = load.transport
        self._workers = load.workers
        self._environment = load.environment
        self._sleep = load.sleep

    async def listing(self) -> Listing:
        """The files of the revision.

        Raises:
            LocalEntryNotFoundError: Offline, and nothing is saved.
            HubError: The Hub can't be asked, or refuses, and nothing is saved.
        """
        revision = self._asked.revision
        saved = await self._cache.saved_listing(revision, offline=self._environment.offline)
        if self._environment.offline:
            if saved is None:
                raise LocalEntryNotFoundError(
                    f"Offline, and nothing of {self._asked} is in the cache {self._environment.cache}. Load it once with a connection.",
                    repo=self._asked.repo,
                )
            return saved
        if saved is not None and is_commit(revision):
            return saved
        with self._events.info() as span:
            try:
                fetched = await self._fetch(Retries(self._sleep, LIMIT if saved is None else 0))
            except HubError as error:
                if saved is None:
                    await self._give_hint(error)
                    raise
                _logger.warning(
                    "using the saved metadata of %s (commit %s), which may be older: %s",
                    self._asked,
                    saved.commit[:12],
                    error,
                )
                span.metadata["result"] = "saved"
                return saved
            await self._cache.save_listing(fetched, revision)
            span.metadata["result"] = "fetched"
            return fetched

    async def _fetch(self, retries: Retries) -> Listing:
        asked = self._asked
        api = f"{asked.endpoint}/api/models/{asked.repo}"
        url = f"{api}/revision/{quote(asked.revision, safe='')}?blobs=true"
        body, _ = await self._get(url, retries)
        pinned = asked.revision if is_commit(asked.revision) else None
        listing = await self._workers.run(parse_info, body, asked.repo, pinned=pinned)  # may be many megabytes
        if listing.needs_tree:
            retries.progress()
            listing = listing.with_files(
                await self._tree(f"{api}/tree/{listing.commit}?recursive=true&expand=false", retries)
            )
        return listing

    async def _tree(self, url: str, retries: Retries) -> dict[str, FileInfo]:
        """All pages of the tree; nothing where a mirror does not have it."""
        files: dict[str, FileInfo] = {}
        for _ in range(_PAGES_LIMIT):
            try:
                body, following = await self._get(url, retries)
                files |= await self._workers.run(parse_tree_page, body, self._asked.repo)
            except (HubHTTPError, HubConsistencyError) as error:
                if not files and not getattr(error, "retryable", False):
                    _logger.debug("no tree of %s: %s", self._asked, error)
                    return {}
                raise
            if following is None:
                return files
            try:
                following = urljoin(url, following)
                same = origin_of(following) == origin_of(url)
            except ValueError:  # no address at all
                same = False
            if not same:
                raise HubConsistencyError(
                    f"{self._asked}: the next page of the tree is on another server. Nothing was kept."
                )
            url = following
        raise HubConsistencyError(f"{self._asked}: the tree has more than {_PAGES_LIMIT} pages.")

    async def _get(self, url: str, retries: Retries) -> tuple[bytes, str | None]:
        """Body and next page of a request for JSON."""
        while True:
            try:
                async with self._transport.get(url, timeout=self._environment.metadata_timeout) as exchange:
                    last = exchange.answer
                    if last.status != 200:
                        body, _ = await exchange.read(ERROR_BODY_LIMIT)
                        raise error_of(
                            last.status, last.headers, body, self._asked, from_hub=last.from_hub, now=time.time()
                        )
                    body, complete = await exchange.read(LISTING_LIMIT)
                    if not complete:
                        raise HubConsistencyError(f"{self._asked}: the metadata is larger than {LISTING_LIMIT} bytes.")
                    return body, next_page(last.headers)
            except HubError as error:
                await retries.wait(error)

    async def _give_hint(self, error: HubError) -> None:
        """Files that another tool cached are not used unasked, since nothing says that they are right; but say that they are there."""
        if isinstance(error, HubConnectionError | HubHTTPError) and await self._cache.knows_snapshot(
            self._asked.revision
        ):
            hint = "Files of it are in the cache, without saved metadata: set HF_HUB_OFFLINE=1 to use the cached files unchecked."
            error.args = (f"{error} {hint}", *error.args[1:])
