"""A small cache and several callers: what was compiled for a call is run by it, whoever pushes it out meanwhile."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from tests.actors.fakes import fake_model
from tests.actors.test_model_actor import ask
from tests.compiler.support import Session
from tests.compiler.test_facts import broken, rows
from transmuter_async.compiler import Finished, Missing, pinned
from transmuter_async.telemetry import Telemetry
from transmuter_async.testing import Recorder

pytestmark = pytest.mark.compiles_itself  # the fake compiler's events are no compiles of jax


async def test_a_program_pushed_out_before_its_call_runs_is_not_compiled_again() -> None:
    bus = Telemetry()
    async with fake_model(cache_size=1, telemetry=bus) as (compiled, compiler), Recorder(bus) as recorder:
        await compiled.run({"x": 0, "keys": "c"})
        answers: dict[int, object] = {}
        compiler.compiles.shut()
        async with anyio.create_task_group() as group:
            group.start_soon(ask, compiled, answers, 1, "a")
            await compiler.compiles.wait_came(2)
            group.start_soon(ask, compiled, answers, 2, "b")
            while compiled._actor._paused < 2:
                await anyio.lowlevel.checkpoint()
            compiler.computes.shut()
            group.start_soon(ask, compiled, answers, 3, "c")
            await compiler.computes.wait_came(2)
            compiler.compiles.open()
            while compiled._actor._counts["compiles"] < 3:  # both are ready, and go into the cache one after the other
                await anyio.lowlevel.checkpoint()
            compiler.computes.open()
        assert answers == {1: 101, 2: 102, 3: 103}
        assert compiler.compiles.came == [(0, "c"), (0, "a"), (0, "b")]
        assert (await compiled.statistics()).misses == 3
    names = [event.name for event in recorder.events]
    assert names.count("transmuter.cache.miss") == names.count("transmuter.segment.compile.stop") == 3
    assert names.count("transmuter.cache.evict") == 2


def test_an_execution_runs_what_it_was_given_when_the_cache_has_it_no_more() -> None:
    session = Session(broken(1), cache_size=1)
    want = session(rows(6))
    session.cache.clear()
    execution = session.prepared.start(session.prepared.take_inputs(rows(6)), seed=0, device=False)
    told: list[object] = []
    misses = 0
    with pinned():
        while isinstance(step := execution.advance(session.cache, told.append), Missing):
            misses += 1
            segment = step.job.run(told.append)
            session.cache.put(segment, told.append)
            session.cache.clear()
            execution.given = segment
    assert isinstance(step, Finished)
    assert all((step.outputs[name] == value).all() for name, value in want.items())
    assert misses == 2
    assert [type(fact).__name__ for fact in told].count("CacheMiss") == 2


def test_what_another_call_would_need_is_not_run() -> None:
    session = Session(broken(1), cache_size=1)
    session(rows(6))
    [other, *_] = session.cache.segments()
    session.cache.clear()
    execution = session.prepared.start(session.prepared.take_inputs(rows(7)), seed=0, device=False)
    execution.given = other
    with pinned():
        assert isinstance(execution.advance(session.cache, lambda fact: None), Missing)
