"""Whatever a server says: errors of the Hub only, within the rules for names and numbers, and nothing secret in any text."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import traceback
from collections.abc import Iterator
from email.utils import formatdate

import aiohttp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.hub.fake_hub import Fault, Lfs
from tests.hub.support import TOKEN, World
from transmuter_async.hub import HubConsistencyError, HubError
from transmuter_async.hub.answers import (
    Asked,
    content_start,
    error_of,
    hub_warnings,
    next_page,
    read_facts,
    server_wait,
)
from transmuter_async.hub.listing import parse_info, parse_official_tree, parse_saved, parse_tree_page

PLACES = [("info", "main"), ("resolve", "p"), ("cdn", "p")]
DIGITS = "9" * 5000  # more than int() reads
COMMIT = "c" * 40


# -- nothing but errors of the Hub ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "what"), PLACES)
async def test_redirects_to_what_is_no_address(world: World, kind: str, what: str) -> None:
    world.fake.repo().commit({"p": Lfs(b"x" * 1000)})
    for location in (
        "http://[::1/x",
        "http://h:notaport/x",
        "http://h:99999999/x",
        "http://h:0/x",
        "http:///x",
        "http://a..b/x",
        f"http://{'a' * 300}/x",
        "http://0/",
        "javascript:x",
        "//",
    ):
        world.fake.fault(kind, what, Fault(status=302, headers={"Location": location}), always=True)
        with pytest.raises(HubError):
            await world.load()
    assert world.leftovers() == []


@pytest.mark.parametrize(("kind", "what"), PLACES)
@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, {"X-Linked-Size": DIGITS}),
        (429, {"RateLimit": f'"r";r=0;t={DIGITS}'}),
        (429, {"RateLimit": f'"r";r={DIGITS};t=1'}),
        (503, {"Retry-After": DIGITS}),
        (503, {"Retry-After": "Mon, 01 Jan 99999999999 00:00:00 GMT"}),
        (206, {"Content-Range": f"bytes 0-{DIGITS}/{DIGITS[:3000]}"}),
        (200, {"Content-Encoding": "gzip"}),
        (200, {"Content-Encoding": "br"}),
        (200, {"Link": '<http://[::1/>; rel="next"'}),
    ],
)
async def test_odd_headers(world: World, kind: str, what: str, status: int, headers: dict[str, str]) -> None:
    commit = world.fake.repo().commit({"p": Lfs(b"x" * 1000)})
    body = json.dumps({"sha": commit, "siblings": [{"rfilename": "p"}]}).encode() if kind == "info" else b"x" * 1000
    world.fake.fault(kind, what, Fault(status=status, headers=headers, body=body), always=True)
    with contextlib.suppress(HubError):
        assert (await world.load())["p"].read_bytes() == b"x" * 1000
    assert all(0 <= seconds <= 301 for seconds in world.naps.seconds)
    assert world.leftovers() == []


async def test_the_next_page_of_a_tree_is_no_address(world: World) -> None:
    world.fake.repo().commit({"p": Lfs(b"x")})
    world.fake.repo().blobs = False
    for link in ("http://[::1/", "http://h:notaport/", "http://other.invalid/", "ftp:x"):
        world.fake.fault("tree", world.fake.repo().branches["main"], Fault(headers={"Link": f'<{link}>; rel="next"'}))
        with pytest.raises(HubConsistencyError):
            await world.load()


TEXT = st.text(st.characters(min_codepoint=1, max_codepoint=0xFF), max_size=80)
NUMBER = st.one_of(st.integers(-5, 10**20).map(str), st.just(DIGITS), TEXT)
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "X-Linked-Size": NUMBER,
        "Content-Length": NUMBER,
        "X-Linked-ETag": TEXT,
        "ETag": TEXT,
        "X-Repo-Commit": TEXT,
        "X-Error-Code": st.one_of(st.sampled_from(["RepoNotFound", "GatedRepo", "EntryNotFound"]), TEXT),
        "X-Error-Message": TEXT,
        "X-HF-Warning": TEXT,
        "X-Request-Id": TEXT,
        "Content-Encoding": TEXT,
        "Content-Range": st.one_of(
            st.tuples(NUMBER, NUMBER, NUMBER).map(lambda each: "bytes {}-{}/{}".format(*each)), TEXT
        ),
        "Retry-After": st.one_of(NUMBER, st.integers(-(10**11), 10**11).map(formatdate), TEXT),
        "RateLimit": st.one_of(st.tuples(NUMBER, NUMBER).map(lambda each: '"x";r={};t={}'.format(*each)), TEXT),
        "Link": st.one_of(TEXT.map(lambda text: f'<{text}>; rel="next"'), TEXT),
    },
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(
                "sha siblings rfilename size blobId lfs sha256 type path oid error errors message format commit repo files etag "
                "format_version blob_id lfs_sha256".split()
            ),
            inner,
            max_size=5,
        ),
    ),
    max_leaves=20,
)
BODY = st.one_of(JSON.map(lambda value: json.dumps(value).encode()), st.binary(max_size=60), st.just(b"[" * 10_000))


@given(st.sampled_from([200, 206, 301, 400, 401, 403, 404, 408, 429, 500, 503]), HEADERS, BODY, st.booleans())
@example(429, {"Retry-After": "Fri, 31 Dec 9999 23:59:59 -0000"}, b"", True)
@example(503, {"Retry-After": "Mon, 01 Jan 99999999999 00:00:00 GMT"}, b"", True)
def test_any_answer_is_understood_or_refused(status: int, headers: dict[str, str], body: bytes, from_hub: bool) -> None:
    asked = Asked("https://huggingface.co", "org/m", "main", "p", TOKEN)
    facts = read_facts(status, headers)
    assert facts.size is None or facts.size >= 0
    assert content_start(status, headers, 5, 10) in (0, 5, None)
    seconds = server_wait(status, headers, 1.7e9)
    assert seconds is None or 1 <= seconds <= 301
    assert isinstance(error_of(status, headers, body, asked, from_hub=from_hub, now=1.7e9), HubError)
    next_page(headers)
    hub_warnings(headers)


@given(BODY)
def test_any_metadata_is_understood_or_refused(body: bytes) -> None:
    for parse in (lambda: parse_info(body, "org/m", pinned=None), lambda: parse_tree_page(body, "org/m")):
        with contextlib.suppress(HubConsistencyError):
            parse()
    for saved in (parse_saved, parse_official_tree):
        assert saved(body, "org/m", COMMIT) is None or b"files" in body


# -- nothing secret in any text -----------------------------------------------------------------------------------------


def everything(error: BaseException) -> str:
    """What anybody can show of an error: its texts, those of its causes, and the traceback."""
    texts = ["".join(traceback.format_exception(error))]
    cause: BaseException | None = error
    while cause is not None:
        texts += [str(cause), repr(cause)]
        cause = cause.__cause__
    return "\n".join(texts)


ECHOES = [
    Fault(status=400, headers={"X-Error-Message": f"bad {TOKEN}"}),
    Fault(status=403, body=b'{"error": "no %s"}' % TOKEN.encode()),
    Fault(status=403, body=json.dumps({"errors": [{"message": TOKEN}]}).encode().replace(b"hf", b"\\u0068f")),
    Fault(status=401, headers={"X-Error-Message": f"Invalid credentials in Authorization header {TOKEN}"}),
    Fault(status=500, headers={"X-Request-Id": TOKEN}),
    Fault(status=302, headers={"Location": f"ftp://x/{TOKEN}"}),
    Fault(status=302, headers={"Location": f"http://127.0.0.1:1/{TOKEN}/x"}),
    Fault(status=302, headers={"Location": f"http://{TOKEN}.invalid/x"}),
    Fault(headers={"X-HF-Warning": f"topic; you sent {TOKEN}"}),  # last: it is an answer
]


@pytest.mark.parametrize(("kind", "what"), PLACES)
async def test_a_server_that_says_the_token_back(
    world: World, kind: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "transmuter_async")
    world.fake.repo().commit({"p": Lfs(b"x" * 1000)})
    failed = 0
    for echo in ECHOES:
        world.fake.fault(kind, what, echo, always=True)
        try:
            await world.load()
        except HubError as error:
            failed += 1
            assert TOKEN not in everything(error), echo
    assert failed == len(ECHOES) - 1
    assert TOKEN not in caplog.text
    assert world.events
    assert not any(TOKEN in repr(event) for event in world.events)
    for path in world.cache.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()


@pytest.fixture
def nonsense() -> Iterator[int]:
    """The port of a server that does not speak HTTP."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 nonsense\r\n\r\n")

    thread = threading.Thread(target=serve)
    thread.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()


async def test_a_signature_and_a_token_are_in_no_cause_of_an_error(world: World, nonsense: int) -> None:
    world.fake.repo().commit({"p": Lfs(b"x" * 1000)})
    address = f"http://127.0.0.1:{nonsense}"
    world.fake.fault("resolve", "p", Fault(location=f"{address}/p?Signature=secret"), always=True)
    with pytest.raises(HubError) as caught:
        await world.load()
    assert "Signature" not in everything(caught.value)
    assert not any("Signature" in repr(event) for event in world.events)
    with pytest.raises(HubError) as caught:
        await world.load(revision="other", client={"endpoint": address})
    assert TOKEN not in everything(caught.value)


# -- and large files take their time ------------------------------------------------------------------------------------


async def test_only_silence_is_limited_not_the_whole_download(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[aiohttp.ClientTimeout] = []
    get = aiohttp.ClientSession.get

    def spy(self: aiohttp.ClientSession, url: object, **options: object) -> object:
        limits.append(options["timeout"])  # type: ignore[arg-type]
        return get(self, url, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(aiohttp.ClientSession, "get", spy)
    world.fake.repo().commit({"p": Lfs(b"x" * 1000)})
    await world.load(client={"metadata_timeout": 3, "download_timeout": 7})
    assert [(each.total, each.sock_connect, each.sock_read) for each in limits] == [
        (None, 3, 3),
        (None, 7, 7),
        (None, 7, 7),
    ]
