"""What can happen to the bytes on their way."""

from __future__ import annotations

import logging

import anyio
import pytest

from tests.hub.fake_hub import Fault, Lfs, git_sha1, sha256
from tests.hub.support import TOKEN, World, wait_for
from transmuter_async.hub import (
    ChecksumError,
    FileTooLargeError,
    GatedRepoError,
    HubConnectionError,
    HubConsistencyError,
    HubHTTPError,
)
from transmuter_async.telemetry import Telemetry

LARGE = bytes(range(256)) * 4096 * 3  # 3 MiB: several batches
SMALL = b"ordinary" * 100
S = len(LARGE)
FILES = {"p": Lfs(LARGE)}
DONE = [("info", "fetched"), ("dl", "p", S)]


def ranges(world: World, kind: str = "cdn") -> list[str | None]:
    return [each.range for each in world.fake.requests if each.kind == kind]


async def load_and_check(world: World) -> None:
    found = await world.load()
    assert found["p"].read_bytes() == LARGE
    assert world.told() == DONE
    assert world.blobs() == [sha256(LARGE)]
    assert world.leftovers() == []


async def test_21_a_cut_is_resumed_from_the_hub(world: World) -> None:
    world.fake.repo().commit(FILES)
    world.fake.fault("cdn", "p", Fault(cut=1_500_000), Fault(cut=1_000_000))
    await load_and_check(world)
    assert ranges(world) == [None, "bytes=1500000-", "bytes=2500000-"]
    assert ranges(world, "resolve") == ranges(world)
    assert len({each.raw for each in world.fake.requests if each.kind == "cdn"}) == 3, "each attempt has a fresh link"
    assert len(world.naps.seconds) == 2


async def test_21_progress_resets_the_count(world: World) -> None:
    world.fake.repo().commit(FILES)
    world.fake.fault("cdn", "p", *[Fault(cut=200_000)] * 14)
    await load_and_check(world)
    assert max(world.naps.seconds) <= 1.2


@pytest.mark.parametrize(
    "answer",
    [Fault(ignore_range=True), Fault(wrong_range=True), Fault(gzip=True), Fault(status=416)],
    ids=["ignored", "wrong range", "gzip", "416"],
)
async def test_22_23_a_resume_that_is_not_answered_as_asked(world: World, answer: Fault) -> None:
    world.fake.repo().commit(FILES)
    world.fake.fault("cdn", "p", Fault(cut=1_500_000), answer)
    await load_and_check(world)
    again = [] if answer.ignore_range else [None]
    assert ranges(world) == [None, "bytes=1500000-", *again]


async def test_22_a_whole_file_that_is_coded_all_the_same(world: World) -> None:
    world.fake.repo().commit({"p": SMALL})
    world.fake.fault("cache", "p", Fault(gzip=True))
    found = await world.load()
    assert found["p"].read_bytes() == SMALL
    assert world.told()[1:] == [("dl", "p", len(SMALL))]


@pytest.mark.parametrize("what", ["etag", "commit", "size"])
@pytest.mark.parametrize("after", [None, 1_500_000])
async def test_24_an_answer_that_contradicts_the_metadata(world: World, what: str, after: int | None) -> None:
    commit = world.fake.repo().commit(FILES)
    fault = {
        "etag": Fault(etag="a" * 64),
        "commit": Fault(commit="b" * 40),
        "size": Fault(headers={"X-Linked-Size": "5"}),
    }[what]
    if after is not None:
        world.fake.fault("cdn", "p", Fault(cut=after))
        world.fake.fault("resolve", "p", Fault())
    world.fake.fault("resolve", "p", fault)
    with pytest.raises(HubConsistencyError, match="Nothing was kept"):
        await world.load()
    assert world.told() == [("info", "fetched"), ("dl!", "p", "HubConsistencyError")]
    assert len(ranges(world)) == (0 if after is None else 1), "not a byte of the body was asked for"
    assert world.leftovers() == []
    assert world.blobs() == []
    assert not world.pointer(commit, "p").exists()


@pytest.mark.parametrize("lfs", [True, False])
async def test_25_a_flipped_byte(world: World, lfs: bool) -> None:
    world.fake.repo().commit({"p": Lfs(LARGE) if lfs else LARGE})
    where = "cdn" if lfs else "cache"
    world.fake.fault(where, "p", Fault(flip=S // 2))
    assert (await world.load())["p"].read_bytes() == LARGE
    assert world.told() == DONE
    assert ranges(world, where) == [None, None]
    assert world.leftovers() == []


async def test_25_flipped_twice_is_an_error(world: World) -> None:
    commit = world.fake.repo().commit(FILES)
    world.fake.fault("cdn", "p", Fault(flip=0), Fault(cut=1_500_000), Fault(flip=0))
    with pytest.raises(ChecksumError, match="Two downloads were wrong") as caught:
        await world.load()
    assert caught.value.expected == sha256(LARGE)
    assert world.told() == [("info", "fetched"), ("dl!", "p", "ChecksumError")]
    assert world.blobs() == []
    assert world.leftovers() == []
    assert not world.pointer(commit, "p").is_symlink()


async def test_26_too_long(world: World) -> None:
    world.fake.repo().commit(FILES)
    world.fake.fault("cdn", "p", Fault(long=50), Fault(long=50))
    with pytest.raises(HubConsistencyError, match=f"more than the {S} bytes"):
        await world.load()
    assert world.told() == [("info", "fetched"), ("dl!", "p", "HubConsistencyError")]
    assert world.leftovers() == []
    assert world.blobs() == []


@pytest.mark.parametrize("chunked", [True, False])
async def test_26_too_short_with_a_good_end(world: World, chunked: bool) -> None:
    world.fake.repo().commit(FILES)
    world.fake.fault("cdn", "p", Fault(short=1000, chunked=chunked))
    await load_and_check(world)
    assert ranges(world) == [None, f"bytes={S - 1000}-"]


async def test_27_the_signed_link_is_sent_as_it_is(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    world.fake.repo().commit({"p": Lfs(LARGE, xet=True)})
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine 127.0.0.1 login a password b\nmachine localhost login a password b\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(netrc))
    await load_and_check(world)
    (request,) = [each for each in world.fake.requests if each.kind == "cdn"]
    assert "Policy=a%2Fb%2Bc" in request.raw
    assert "filename%2A%3DUTF-8%27%27x" in request.raw
    assert not {"Authorization", "Cookie"} & set(request.headers)
    (resolve,) = [each for each in world.fake.requests if each.kind == "resolve"]
    assert resolve.token == f"Bearer {TOKEN}"


async def test_28_another_port_is_another_origin(world: World) -> None:
    world.fake.repo().commit({"p": SMALL, "q": SMALL + b"q"})
    # From the Hub to the CDN's port on the Hub's host, and from there back to the Hub: the token stays behind for good.
    world.fake.fault(
        "resolve", "p", Fault(status=302, headers={"Location": f"http://127.0.0.1:{world.fake.cdn_port}/trap"})
    )
    back = f"{world.fake.endpoint}/org/m/resolve/{world.fake.repo().branches['main']}/q"
    world.fake.fault("cdn", "/trap", Fault(status=302, headers={"Location": back}))
    with pytest.raises(HubConsistencyError):
        await world.load("p")
    trap, after = [each for each in world.fake.requests if each.kind == "cdn" or each.what == "q"][:2]
    assert (trap.what, trap.token) == ("/trap", None)
    assert (after.what, after.token) == ("q", None)


async def test_28_https_to_http_is_refused() -> None:
    from transmuter_async.hub.transport import _follow

    assert _follow("https://a/x", "/y") == "https://a/y"
    assert _follow("http://a/x", "https://b/y?q=%2F") == "https://b/y?q=%2F"
    with pytest.raises(HubConsistencyError, match="from https to http"):
        _follow("https://a/x?sig=1", "http://a/y")
    with pytest.raises(HubConsistencyError, match="no web address"):
        _follow("https://a/x", "file:///etc/passwd")


async def test_29_an_expired_link_is_asked_for_again(world: World) -> None:
    world.fake.repo().commit(FILES)
    world.fake.fault("cdn", "p", Fault(cut=1_500_000))
    world.fake.fault("resolve", "p", Fault(), Fault(expired=True))
    await load_and_check(world)
    assert ranges(world) == [None, "bytes=1500000-", "bytes=1500000-"]
    assert len(world.naps.seconds) == 1


async def test_29_twice_expired_is_an_error_and_not_gated(world: World) -> None:
    world.fake.repo().commit(FILES)
    world.fake.fault("resolve", "p", Fault(expired=True), always=True)
    with pytest.raises(HubHTTPError, match="the storage behind the Hub answered 403") as caught:
        await world.load()
    assert type(caught.value) is HubHTTPError
    assert len(ranges(world)) == 2


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"RateLimit": '"resolvers";r=0;t=55', "Retry-After": "3"}, 56),
        ({"Retry-After": "7"}, 8),
        ({"Retry-After": "100000"}, 301),
        ({"Retry-After": "soon"}, None),
    ],
)
async def test_30_the_server_says_how_long_to_wait(
    world: World, headers: dict[str, str], seconds: float | None
) -> None:
    world.fake.repo().commit(FILES)
    world.fake.fault("resolve", "p", *[Fault(status=429, headers=headers)] * 2)
    await load_and_check(world)
    if seconds is None:
        assert 0.8 <= world.naps.seconds[0] <= 1.2
    else:
        assert world.naps.seconds == [seconds, seconds]


async def test_30_at_most_five_retries(world: World) -> None:
    world.fake.repo().commit(FILES)
    world.fake.fault("resolve", "p", Fault(status=429, headers={"Retry-After": "7"}), always=True)
    with pytest.raises(HubHTTPError, match="429") as caught:
        await world.load()
    assert caught.value.status == 429
    assert world.naps.seconds == [8] * 5


async def test_31_a_gated_file_ends_the_load(world: World) -> None:
    world.fake.repo().commit({"a": b"done", "p": Lfs(LARGE), "slow": Lfs(LARGE + b"x")})
    gated = Fault(
        status=403, headers={"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, hold=True
    )
    world.fake.fault("resolve", "p", gated)
    world.fake.fault("cdn", "slow", Fault(stall=1000))

    async def let_go() -> None:
        await stored.receive()
        await wait_for(lambda: "cdn slow" in world.fake.asked())
        world.fake.release()

    bus = Telemetry()
    async with (
        bus.subscribe("transmuter.hub.download.stop") as stored,
        world.client(bus=bus) as hub,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(let_go)
        with pytest.raises(GatedRepoError, match=f"request access at {world.fake.endpoint}/org/m"):
            await hub.download("org/m")
    told = world.told()
    assert told[0] == ("info", "fetched")
    assert told[1:] == [("dl", "a", 4), ("dl!", "p", "GatedRepoError"), ("dl!", "slow", "cancelled")]
    assert world.asked("resolve").count("resolve p") == 1
    assert world.blobs() == [git_sha1(b"done")]


async def test_a_file_that_is_too_large_for_http(world: World) -> None:
    from tests.hub.fake_hub import Repeated

    class Huge(Repeated):
        sha256 = "c" * 64

    world.fake.repo().commit({"p": Lfs(Huge(50 * 10**9 + 1))})
    with pytest.raises(FileTooLargeError, match="`hf` tool"):
        await world.load()
    assert world.told() == [("info", "fetched"), ("dl!", "p", "FileTooLargeError")]
    assert world.asked("resolve") == []


async def test_a_stalled_download_times_out_and_goes_on(world: World) -> None:
    world.fake.repo().commit(FILES)
    world.fake.fault("cdn", "p", Fault(stall=1_500_000))
    await world.load(client={"download_timeout": 0.3})
    assert world.told() == DONE
    assert ranges(world) == [None, "bytes=1500000-"]


async def test_a_redirect_in_a_circle(world: World) -> None:
    world.fake.repo().commit(FILES)
    world.fake.fault("resolve", "p", Fault(status=302, headers={"Location": "p?again"}), always=True)
    with pytest.raises(HubConsistencyError, match="More than 20 redirects"):
        await world.load()
    assert len(world.asked("resolve")) == 21


async def test_a_warning_of_the_hub_is_shown_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.fake.repo().commit({"a": b"1", "b": b"2"})
    for file in "ab":
        world.fake.fault("cache", file, Fault(headers={"X-HF-Warning": "quota; you are near your limit"}))
    with caplog.at_level(logging.WARNING, "transmuter_async.hub"):
        await world.load()
    assert caplog.text.count("you are near your limit") == 1


async def test_an_answer_without_the_hubs_headers_is_checked_by_hash(world: World) -> None:
    world.fake.repo().commit(FILES)
    world.fake.fault("resolve", "p", Fault(headers={"X-Linked-ETag": None, "X-Linked-Size": None}, commit=""))
    world.fake.fault("cdn", "p", Fault(chunked=True))
    await load_and_check(world)


async def test_a_refused_connection_is_retried(world: World) -> None:
    world.fake.repo().commit(FILES)
    world.fake.fault("resolve", "p", *[Fault(refuse=True)] * 2)
    await load_and_check(world)
    world.fake.fault("resolve", "q", Fault(refuse=True), always=True)
    world.fake.repo().commit({"q": b"2"})
    with pytest.raises(HubConnectionError):
        await world.load()


async def test_21_a_server_that_starts_again_each_time_is_given_up(world: World) -> None:
    """It never gets farther than it was once, though now and then farther than the last time."""
    world.fake.repo().commit({"p": Lfs(LARGE)})
    cuts = [600, 300, 500] * 20
    world.fake.fault("cdn", "p", *(Fault(cut=cut, ignore_range=True) for cut in cuts))
    with pytest.raises(HubConnectionError):
        await world.load()
    assert len(world.fake.asked("cdn")) == 1 + 5
    assert world.leftovers() == []
