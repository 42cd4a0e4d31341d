"""The server: Hub on 127.0.0.1, CDN on localhost, in a thread of its own, so that clients on any loop (or on none) can talk to it."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import parse_qs, quote, unquote

from aiohttp import web

from tests.hub.fake_hub.content import Stored
from tests.hub.fake_hub.faults import NONE, Fault
from tests.hub.fake_hub.repository import FakeRepo, xet_hash

_PIECE = 1 << 18


@dataclass(frozen=True)
class Request:
    """What was asked for: `kind` is info, tree, resolve, cache (the resolve cache), cdn or unknown; `what` the revision or file."""

    kind: str
    what: str
    method: str
    raw: str
    headers: Mapping[str, str]

    @property
    def token(self) -> str | None:
        return self.headers.get("Authorization")

    @property
    def range(self) -> str | None:
        return self.headers.get("Range")

    def __repr__(self) -> str:
        return f"{self.method} {self.kind} {self.what}" + (f" [{self.range}]" if self.range else "")


class FakeHub:
    """A context manager.

    Attributes:
        requests: What was asked for, in order.
        official: Answer 401 with an `X-Error-Code`, which the official client needs on http.
        prefix: Path in front of everything (`HF_ENDPOINT` with a path).
    """

    def __init__(self) -> None:
        self.repos: dict[str, FakeRepo] = {}
        self.requests: list[Request] = []
        self.prefix = ""
        self._faults: dict[tuple[str, str], deque[Fault]] = defaultdict(deque)
        self._always: dict[tuple[str, str], Fault] = {}
        self._links: dict[str, tuple[Stored, str]] = {}
        self._expired: set[str] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="fake-hub")
        self.hub_port = self.cdn_port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.hub_port}{self.prefix}"

    @property
    def cdn(self) -> str:
        return f"http://localhost:{self.cdn_port}"

    def repo(self, name: str = "org/m") -> FakeRepo:
        """A repository, made on first use."""
        return self.repos.setdefault(name, FakeRepo(name))

    def fault(self, kind: str, what: str, *faults: Fault, always: bool = False) -> None:
        """Faults of the next answers to requests of a kind for a file (or revision), one each; or of all of them."""
        if always:
            (self._always[kind, what],) = faults
        else:
            self._faults[kind, what].extend(faults)

    def heal(self) -> None:
        """No more faults."""
        self._faults.clear()
        self._always.clear()

    def release(self) -> None:
        """Lets go what `hold` holds."""
        self._loop.call_soon_threadsafe(self._hold.set)

    def asked(self, *kinds: str) -> list[str]:
        """`kind what` of the requests so far, of some kinds or all."""
        return [f"{each.kind} {each.what}" for each in self.requests if not kinds or each.kind in kinds]

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._hold = asyncio.Event()
        runners = []
        for handler, host in ((self._hub, "127.0.0.1"), (self._cdn, "127.0.0.1")):
            runner = web.ServerRunner(
                web.Server(handler, access_log=None), handler_cancellation=True, shutdown_timeout=0.1
            )
            await runner.setup()
            await web.TCPSite(runner, host, 0).start()
            runners.append(runner)
        self.hub_port, self.cdn_port = (runner.addresses[0][1] for runner in runners)
        self._ready.set()
        await self._stop.wait()
        self._hold.set()
        for runner in runners:
            await runner.cleanup()

    def _take(self, request: web.BaseRequest, kind: str, what: str) -> Fault:
        raw = request.raw_path
        self.requests.append(Request(kind, what, request.method, raw, dict(request.headers)))
        waiting = self._faults[kind, what]
        return waiting.popleft() if waiting else self._always.get((kind, what), NONE)

    # -- the Hub ----------------------------------------------------------------------------------------------------

    async def _hub(self, request: web.BaseRequest) -> web.StreamResponse:
        path, _, query = request.raw_path.removeprefix(self.prefix).partition("?")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            return await self._api(request, "/".join(parts[2:4]), parts[4:], query)
        if parts[:3] == ["api", "resolve-cache", "models"] and len(parts) >= 7:
            return await self._resolve(request, "/".join(parts[3:5]), parts[5], unquote("/".join(parts[6:])), "cache")
        if len(parts) >= 5 and parts[2] == "resolve":
            return await self._resolve(request, "/".join(parts[:2]), parts[3], unquote("/".join(parts[4:])), "resolve")
        self._take(request, "unknown", path)
        return web.Response(status=404)

    async def _api(self, request: web.BaseRequest, name: str, rest: list[str], query: str) -> web.StreamResponse:
        kind = "tree" if rest[:1] == ["tree"] else "info"
        revision = unquote(rest[1]) if len(rest) > 1 else "main"
        fault = self._take(request, kind, revision)
        early = await self._early(request, fault)
        if early is not None:
            return early
        repo = self.repos.get(name)
        if repo is None:
            return _error(404, "RepoNotFound", "Repository not found")
        if repo.renamed_to is not None:
            target = request.raw_path.replace(f"/{name}", f"/{repo.renamed_to}", 1)
            return web.Response(status=307, headers={"Location": target})
        commit = repo.resolve(revision)
        if commit is None:
            return _error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if kind == "info":
            wanted = parse_qs(query).get("blobs", ["false"])[0].lower() == "true"
            return await self._send_json(request, repo.info(commit, blobs=wanted), {}, fault)
        if not repo.tree:
            return web.Response(status=404)
        cursor = int(parse_qs(query).get("cursor", ["0"])[0])
        entries = repo.entries(commit)
        headers = {}
        if cursor + repo.page < len(entries):
            base = f"{self.endpoint}/api/models/{name}/tree/{rest[1]}"
            headers["Link"] = f'<{base}?recursive=true&expand=false&cursor={cursor + repo.page}>; rel="next"'
        return await self._send_json(request, entries[cursor : cursor + repo.page], headers, fault)

    async def _send_json(
        self, request: web.BaseRequest, data: object, headers: dict[str, str], fault: Fault
    ) -> web.StreamResponse:
        body = json.dumps(data).encode() if fault.body is None else fault.body
        headers = {**headers, "Content-Type": "application/json"}
        return await _stream(request, 200, headers, iter([body]), len(body), fault, self._stop)

    async def _resolve(
        self, request: web.BaseRequest, name: str, revision: str, path: str, kind: str
    ) -> web.StreamResponse:
        fault = self._take(request, kind, path)
        early = await self._early(request, fault)
        if early is not None:
            return early
        repo = self.repos.get(name)
        if repo is None:
            return _error(404, "RepoNotFound", "Repository not found")
        if repo.renamed_to is not None:
            return web.Response(
                status=307, headers={"Location": request.raw_path.replace(f"/{name}/", f"/{repo.renamed_to}/", 1)}
            )
        commit = repo.resolve(unquote(revision))
        if commit is None:
            return _error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if kind == "cache" and revision != commit:
            return web.Response(status=400)
        file = repo.commits[commit].get(path)
        if file is None:
            return _error(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        etag = file.etag if fault.etag is None else fault.etag
        headers = {"X-Repo-Commit": commit if fault.commit is None else fault.commit, "Accept-Ranges": "bytes"}
        if file.lfs:
            headers |= {
                "X-Linked-ETag": f'"{etag}"',
                "X-Linked-Size": str(file.content.size),
                "ETag": f'"{hashlib.sha256(b"r").hexdigest()}"',
            }
            if file.xet:
                headers["X-Xet-Hash"] = xet_hash(file)
                headers["Link"] = (
                    f'<{self.endpoint}/api/models/{name}/xet-read-token/{commit}>; rel="xet-auth", <x>; rel="xet-reconstruction-info"'
                )
            return self._redirect(302, self._sign(file, path, fault), headers, fault)
        if kind == "resolve" and not repo.direct:
            if repo.linked_headers:
                headers |= {"X-Linked-ETag": f'"{etag}"', "X-Linked-Size": str(file.content.size)}
            query = f"download=true&etag=%22{etag}%22"
            location = f"{self.prefix}/api/resolve-cache/models/{name}/{commit}/{quote(path)}?{query}"
            return self._redirect(307, location, headers, fault)
        headers["ETag"] = f'"{etag}"'
        coded = kind == "resolve" and "gzip" in request.headers.get("Accept-Encoding", "")
        return await self._send_file(request, file, headers, fault, coded=coded)

    def _redirect(self, status: int, location: str, headers: dict[str, str], fault: Fault) -> web.Response:
        text = "Redirecting to " + location
        changed = _changed({**headers, "Location": location if fault.location is None else fault.location}, fault)
        return web.Response(status=status, headers=changed, text=text)

    def _sign(self, file: Stored, path: str, fault: Fault) -> str:
        query = f"response-content-disposition=inline%3B+filename%2A%3DUTF-8%27%27x&Policy=a%2Fb%2Bc~{len(self._links)}&Signature=z%2F9%3D"
        raw = f"/xet-bridge-us/{file.content.sha256}/{len(self._links)}?{query}"
        self._links[raw] = (file, path)
        if fault.expired:
            self._expired.add(raw)
        return self.cdn + raw

    # -- the CDN ----------------------------------------------------------------------------------------------------

    async def _cdn(self, request: web.BaseRequest) -> web.StreamResponse:
        file, path = self._links.get(request.raw_path, (None, ""))
        fault = self._take(request, "cdn", path or request.raw_path)
        early = await self._early(request, fault)
        if early is not None:
            return early
        if file is None or request.raw_path in self._expired or "Authorization" in request.headers:
            return web.Response(status=403, text="<Error><Code>AccessDenied</Code></Error>")
        own = hashlib.sha256(b"cdn" + file.content.sha256.encode()).hexdigest()
        headers = {"ETag": f'"{own}"', "Accept-Ranges": "bytes", "Set-Cookie": "trap=1"}
        return await self._send_file(request, file, headers, fault)

    async def _send_file(
        self, request: web.BaseRequest, file: Stored, headers: dict[str, str], fault: Fault, *, coded: bool = False
    ) -> web.StreamResponse:
        size = file.content.size
        start, status = 0, 200
        asked = request.headers.get("Range")
        if asked and not fault.ignore_range:
            start = int(asked.removeprefix("bytes=").split("-")[0])
            if start >= size:
                return web.Response(status=416, headers={"Content-Range": f"bytes */{size}"})
            status = 206
            shift = 1 if fault.wrong_range else 0
            headers["Content-Range"] = f"bytes {start - shift}-{size - 1}/{size}"
        if coded or fault.gzip:
            body = gzip.compress(file.content.read(start, size))
            headers |= {"Content-Encoding": "gzip"}
            headers["ETag"] = "W/" + headers["ETag"]
            return await _stream(request, status, headers, iter([body]), None, fault, self._stop)
        pieces = (file.content.read(at, at + _PIECE) for at in range(start, size, _PIECE))
        return await _stream(request, status, headers, pieces, size - start, fault, self._stop)

    async def _early(self, request: web.BaseRequest, fault: Fault) -> web.StreamResponse | None:
        if fault.hold:
            await self._hold.wait()
        if fault.refuse:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if fault.status is not None:
            return web.Response(status=fault.status, headers=_changed({}, fault), body=fault.body)
        return None


async def _stream(
    request: web.BaseRequest,
    status: int,
    headers: dict[str, str],
    pieces: Iterator[bytes],
    length: int | None,
    fault: Fault,
    stop: asyncio.Event,
) -> web.StreamResponse:
    response = web.StreamResponse(status=status, headers=_changed(headers, fault))
    if length is not None:
        length += fault.long - fault.short
    if length is None or fault.chunked:
        response.enable_chunked_encoding()
    else:
        response.content_length = length
    await response.prepare(request)
    if request.method == "HEAD":
        return response
    sent = 0
    for piece in _altered(pieces, length, fault):
        for limit in (fault.cut, fault.stall):
            if limit is not None and sent + len(piece) > limit:
                await response.write(piece[: limit - sent])
                if limit == fault.stall:
                    await stop.wait()
                if request.transport is not None:  # the client may have gone first
                    # Everything before the cut must arrive: close, do not abort.
                    request.transport.close()
                return response
        await response.write(piece)
        sent += len(piece)
    await response.write_eof()
    return response


def _altered(pieces: Iterator[bytes], length: int | None, fault: Fault) -> Iterator[bytes]:
    position = 0
    for piece in pieces:
        if fault.flip is not None and position <= fault.flip < position + len(piece):
            changed = bytearray(piece)
            changed[fault.flip - position] ^= 1
            piece = bytes(changed)
        if fault.short and length is not None:
            piece = piece[: length - position]
        position += len(piece)
        yield piece
    if fault.long:
        yield b"x" * fault.long


def _changed(headers: Mapping[str, str], fault: Fault) -> dict[str, str]:
    merged = {**headers, **fault.headers}
    if fault.etag == "":
        merged = {name: value for name, value in merged.items() if name not in ("ETag", "X-Linked-ETag")}
    if fault.commit == "":
        merged.pop("X-Repo-Commit", None)
    return {name: value for name, value in merged.items() if value is not None}


def _error(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.json_response(
        {"error": message}, status=status, headers={"X-Error-Code": code, "X-Error-Message": message, **(headers or {})}
    )
