"""HTTP: the only file that knows aiohttp.

Redirects are followed by hand, because the facts about a file are on the first answer, and because the token may go to the Hub's own
origin only: once a redirect has left it, the token stays behind for the rest of the chain. No cookies, no netrc, no rewriting of signed
URLs, no compression of files.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urljoin, urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]  # not in typeshed

import aiohttp
import anyio
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from transmuter_async.hub.answers import hub_warnings, without_token
from transmuter_async.hub.environment import Environment
from transmuter_async.hub.errors import HubConnectionError, HubConsistencyError, HubError

__all__ = ["Answer", "Exchange", "Origin", "Transport", "origin_of", "shown"]

REDIRECTS_LIMIT = 20
ERROR_BODY_LIMIT = 1 << 20
LISTING_LIMIT = 64 << 20
_REDIRECT_BODY_LIMIT = 1 << 16
_HUB_ALIASES = ("https://huggingface.co", "https://hf.co")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_DEFAULT_PORTS = {"http": 80, "https": 443}

Origin = tuple[str, str, int | None]
_Address = tuple[Any, Any, int, str, Any]  # as getaddrinfo gives it
_logger = logging.getLogger("transmuter_async.hub")


def origin_of(url: str) -> Origin:
    """Scheme, host and port of a URL: what a token is bound to."""
    parts = urlsplit(url)
    return parts.scheme.lower(), (parts.hostname or "").lower(), parts.port or _DEFAULT_PORTS.get(parts.scheme.lower())


def shown(url: str) -> str:
    """A URL for texts: without its query, which may be a signature, and without credentials."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname}{port}{parts.path}"


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and headers of one answer of a chain of redirects."""

    status: int
    headers: Mapping[str, str]
    from_hub: bool


class Exchange:
    """The last answer of a chain of redirects, whose body can be read.

    Attributes:
        answer: Its status and headers.
    """

    def __init__(self, answer: Answer, response: aiohttp.ClientResponse, url: str) -> None:
        self.answer = answer
        self._response = response
        self._url = url

    async def read(self, limit: int) -> tuple[bytes, bool]:
        """At most `limit` bytes of the body, and whether that was all of it. Errors as of `receive`."""
        body = bytearray()
        while chunk := await self.receive():
            body += chunk
            if len(body) > limit:
                return bytes(body[:limit]), False
        return bytes(body), True

    async def receive(self) -> bytes:
        """The next bytes of the body, as they come; empty at its end.

        Raises:
            HubConnectionError: It was cut, or nothing came for too long.
        """
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _connection_error(error, self._url) from _showable(error)


class Transport:
    """The connections of one load. Used in one asyncio loop."""

    def __init__(self, environment: Environment, token: str | None, warned: set[str], *, connections: int = 8) -> None:
        self._environment = environment
        self._token = token
        self._warned = warned
        self._hub_origins = {origin_of(environment.endpoint), *map(origin_of, _HUB_ALIASES)}
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            with anyio.CancelScope(shield=True):
                await self._session.close()

    @asynccontextmanager
    async def get(
        self,
        url: str,
        *,
        timeout: float,
        headers: Mapping[str, str] | None = None,
        inspect: Callable[[Answer], None] | None = None,
    ) -> AsyncIterator[Exchange]:
        """Sends a GET and follows redirects.

        Args:
            url: Absolute, already encoded: it is sent as it is.
            timeout: Seconds without a byte (and for connecting) after which it has failed.
            headers: Besides `User-Agent` and, for the Hub, `Authorization`.
            inspect: Called with each answer, before its redirect is followed or its body read; may raise.

        Raises:
            HubConnectionError: There is no usable connection.
            HubConsistencyError: A redirect leads nowhere, in a circle, or from https to http.
        """
        session = self._open()
        trusted = True
        for _ in range(REDIRECTS_LIMIT + 1):
            from_hub = origin_of(url) in self._hub_origins
            trusted = trusted and from_hub
            response = await self._send(session, url, trusted, timeout, headers or {})
            async with response:
                # `from_hub` also needs an unbroken chain: what a CDN sends back to the Hub's origin states nothing for the Hub.
                answer = Answer(response.status, response.headers, trusted)
                self._pass_on_warning(answer)
                if inspect is not None:
                    inspect(answer)
                location = response.headers.get("Location")
                if response.status not in _REDIRECTS or location is None:
                    yield Exchange(answer, response, url)
                    return
                await _drain(response)
            url = _follow(url, location, self._token)
        raise HubConsistencyError(
            f"More than {REDIRECTS_LIMIT} redirects, the last to {shown(url)}: it goes in a circle."
        )

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit_per_host=self._connections,
                    resolver=_Resolver(self._environment.metadata_timeout),
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": self._environment.user_agent},
                trust_env=False,  # it would also read ~/.netrc and send its passwords to the CDN
                auto_decompress=True,
                read_bufsize=1 << 18,
            )
        return self._session

    async def _send(
        self, session: aiohttp.ClientSession, url: str, trusted: bool, timeout: float, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        sent = dict(headers)
        if trusted and self._token is not None:
            sent["Authorization"] = f"Bearer {self._token}"
        try:
            return await session.get(
                URL(url, encoded=True),  # yarl would rewrite a signed query
                headers=sent,
                allow_redirects=False,
                proxy=self._proxy(url),
                # The default total of 300 s would end every large download.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeout, sock_read=timeout),
            )
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise _connection_error(error, url) from _showable(error)

    def _proxy(self, url: str) -> str | None:
        proxies = self._environment.proxies
        parts = urlsplit(url)
        proxy = proxies.get(parts.scheme) or proxies.get("all")
        if not proxy or proxy_bypass_environment(parts.netloc.rpartition("@")[2], dict(proxies)):
            return None
        if "://" not in proxy:
            proxy = "http://" + proxy
        if urlsplit(proxy).scheme not in ("http", "https"):
            raise HubConnectionError(
                f"The proxy for {parts.hostname} is of the kind {urlsplit(proxy).scheme!r}, which is not supported: "
                "use an HTTP proxy, or NO_PROXY.",
                retryable=False,
            )
        return proxy

    def _pass_on_warning(self, answer: Answer) -> None:
        found = hub_warnings(answer.headers, self._token) if answer.from_hub else None
        if found is not None and found[0] not in self._warned:
            self._warned.add(found[0])
            _logger.warning("the Hub warns: %s", found[1])


class _Resolver(AbstractResolver):
    """Name look-ups in threads of their own; aiohttp's would use the application's.

    A look-up can't be ended, and may take a minute where a name server is silent. Nobody waits for it: neither a load that is cancelled
    nor the end of the client. Its thread then ends by itself.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[_Address]] = loop.create_future()

        def look_up() -> None:
            try:
                found = socket.getaddrinfo(
                    host, port, type=socket.SOCK_STREAM, family=family, flags=socket.AI_ADDRCONFIG
                )
            except Exception as error:
                _settle(loop, answer, answer.set_exception, error)
            else:
                _settle(loop, answer, answer.set_result, found)

        threading.Thread(target=look_up, name="transmuter-hub-name", daemon=True).start()
        with anyio.fail_after(self._timeout):  # aiohttp's time limits for connecting begin after it
            found = await answer
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=int(address[1]),
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for kind, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        """The threads are the client's."""


def _settle(
    loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Any], set_it: Callable[[Any], None], value: Any
) -> None:
    """Hand over what a look-up found, if anybody still waits."""
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(lambda: None if answer.done() else set_it(value))


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Reads the few bytes that a redirect carries: the connection can then be used again."""
    try:
        await response.content.read(_REDIRECT_BODY_LIMIT)
    except (aiohttp.ClientError, OSError, TimeoutError):
        return  # then it is closed


def _follow(url: str, location: str, token: str | None = None) -> str:
    try:
        target = urljoin(url, location)
        parts = urlsplit(target)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise HubConsistencyError(f"{shown(url)} redirects to something that is no web address. Nothing was kept.")
    if without_token(target, token) != target:
        raise HubConsistencyError(f"{shown(url)} redirects to an address that holds the token, which is refused.")
    if urlsplit(url).scheme == "https" and parts.scheme == "http":
        raise HubConsistencyError(f"{shown(url)} redirects from https to http ({shown(target)}), which is refused.")
    return target


def _showable(error: Exception) -> Exception | None:
    """An error as the cause of ours; None for those that show a whole URL, which may be signed, or the headers of a request."""
    if isinstance(error, (aiohttp.ClientResponseError, aiohttp.InvalidURL)):
        return None
    return error if isinstance(error, (aiohttp.ClientError, OSError)) else None


def _connection_error(error: Exception, url: str) -> HubError:
    where = shown(url)
    kind = type(error).__name__
    if isinstance(
        error, (aiohttp.ClientConnectorCertificateError, aiohttp.ClientSSLError, ssl.SSLCertVerificationError)
    ):
        certificate = isinstance(error, aiohttp.ClientConnectorCertificateError)
        return HubConnectionError(
            f"{where}: the TLS connection failed ({kind}). Check the clock, the certificates and the proxy.",
            retryable=not certificate,
        )
    if isinstance(error, (aiohttp.ClientProxyConnectionError, aiohttp.ClientHttpProxyError)):
        return HubConnectionError(
            f"{where}: the proxy refused ({kind}). Check HTTPS_PROXY and NO_PROXY.", retryable=False
        )
    if isinstance(error, aiohttp.InvalidURL) or (
        isinstance(error, ValueError) and not isinstance(error, aiohttp.ClientError)
    ):
        return HubConsistencyError(f"{where} is not an address that can be asked ({kind}).")
    if isinstance(error, TimeoutError):
        return HubConnectionError(
            f"{where}: no byte came in time. HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT set the limits."
        )
    reason = error.strerror if isinstance(error, OSError) and error.strerror else ""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        reason = "the name can't be resolved"
    return HubConnectionError(
        f"{where}: the connection failed ({kind}{': ' + reason if reason else ''}). Check the network."
    )
