"""A state machine over the actor's messages: any order of calls, cancellations, compiles, failures, crashes and closing.

The model is simple: every call is answered once, with its own result, or with an error that something in its history
explains; computations never exceed the limit; when all gates are open nothing waits.
"""

from __future__ import annotations

import string
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.actors.fakes import fake_model, own_threads, quiet
from transmuter_async.errors import ActorStopped, DeadlineExceeded, Overloaded

pytestmark = pytest.mark.compiles_itself  # the fake compiler's events are no compiles of jax

KEYS = st.text(string.ascii_lowercase[:3], min_size=1, max_size=3)
STEP = st.one_of(
    st.tuples(st.just("call"), KEYS),
    st.tuples(st.just("call"), KEYS),
    st.tuples(st.just("nowait"), KEYS),
    st.tuples(st.just("impatient"), KEYS),
    st.tuples(st.just("bad"), KEYS),
    st.tuples(st.just("cancel"), st.integers(0, 5)),
    st.tuples(st.just("compiles"), st.sampled_from(["shut", "open", "one"])),
    st.tuples(st.just("computes"), st.sampled_from(["shut", "open", "one"])),
    st.tuples(st.just("failing"), st.sampled_from("abc")),
    st.tuples(st.just("mend"), st.sampled_from("abc")),
    st.tuples(st.just("clear"), st.none()),
    st.tuples(st.just("warm"), st.sampled_from("abc")),
    st.tuples(st.just("crash"), st.none()),
    st.tuples(st.just("settle"), st.none()),
)


class Machine:
    def __init__(self, compiled: Any, compiler: Any, group: Any) -> None:
        self.compiled = compiled
        self.compiler = compiler
        self.group = group
        self.scopes: list[anyio.CancelScope] = []
        self.answers: dict[int, Any] = {}
        self.calls: dict[int, tuple[str, str]] = {}
        self.crashes = 0
        self.failed: set[str] = set()
        self.waiting = 0

    async def call(self, x: int, how: str, keys: str, scope: anyio.CancelScope) -> None:
        inputs = {"x": x, "keys": keys, "fails": how == "bad"}
        run = self.compiled.run_nowait if how == "nowait" else self.compiled.run
        with scope:
            try:
                self.answers[x] = (await run(inputs, timeout=0.002 if how == "impatient" else None))["y"]
            except Exception as error:
                self.answers[x] = error
        if scope.cancelled_caught:
            self.answers[x] = "cancelled"

    async def aside(self, work: Any) -> None:
        """A message whose answer does not matter, only that there is one."""
        self.waiting += 1
        try:
            await work
        except (ActorStopped, ValueError):
            pass
        finally:
            self.waiting -= 1

    async def step(self, what: str, value: Any) -> None:
        if what in ("call", "nowait", "impatient", "bad"):
            x, scope = len(self.calls), anyio.CancelScope()
            self.calls[x] = (what, value)
            self.scopes.append(scope)
            self.group.start_soon(self.call, x, what, value, scope)
        elif what == "cancel":
            if self.scopes:
                self.scopes[-1 - value % len(self.scopes)].cancel()
        elif what in ("compiles", "computes"):
            gate = getattr(self.compiler, what)
            {"shut": gate.shut, "open": gate.open, "one": gate.let}[value]()
        elif what == "failing":
            self.compiler.failing[value] = ValueError(f"no {value}")
            self.failed.add(value)
        elif what == "mend":
            self.compiler.failing.pop(value, None)
        elif what == "clear":
            self.group.start_soon(self.aside, self.compiled.clear_cache())
        elif what == "warm":
            self.group.start_soon(self.aside, self.compiled.warm({"keys": value}))
        elif what == "crash":
            if self.crashes < 3 and self.compiled.state == "running":
                self.crashes += 1
                self.compiled._actor.crash(RuntimeError("injected"))
        elif what == "settle":
            await anyio.wait_all_tasks_blocked()

    def check(self) -> None:
        assert self.answers.keys() == self.calls.keys()
        for x, (how, keys) in self.calls.items():
            answer = self.answers[x]
            if answer == "cancelled":
                assert self.scopes[x].cancel_called
            elif isinstance(answer, ActorStopped):
                assert self.crashes
            elif isinstance(answer, DeadlineExceeded):
                assert how == "impatient"
            elif isinstance(answer, Overloaded):
                assert how == "nowait"
            elif isinstance(answer, ValueError):
                refused = how == "bad" and str(answer) == f"the graph refuses {x}"
                assert refused or {f"no {key}" for key in set(keys) & self.failed} >= {str(answer)}
            else:
                assert answer == 100 + x
                assert how != "bad"


async def drive(steps: list[tuple[str, Any]], limit: int, ending: str, cold: bool) -> None:
    async with fake_model(max_concurrency=limit, cache_size=1, mailbox=3) as (compiled, compiler):
        compiler.cold = cold
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                machine = Machine(compiled, compiler, group)
                for what, value in steps:
                    await machine.step(what, value)
                    await anyio.lowlevel.checkpoint()
                if ending == "close":
                    machine.crashes += 1  # `ActorStopped` is explained from now on
                    group.start_soon(compiled.aclose)
                    await anyio.lowlevel.checkpoint()
                compiler.compiles.open()
                compiler.computes.open()
            machine.check()
            assert machine.waiting == 0
            assert compiler.computes.peak <= limit
            if ending == "ask":
                compiler.failing.clear()
                assert await compiled.run({"x": 5000, "keys": "z"}) == {"y": 5100}
                statistics = await quiet(compiled)
                assert statistics.waiting == 0
                assert statistics.answered + statistics.failed + statistics.abandoned == statistics.calls
    assert not own_threads()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(STEP, max_size=40),
    limit=st.sampled_from([1, 2]),
    ending=st.sampled_from(["ask", "close"]),
    cold=st.booleans(),
)
def test_any_order_of_messages(backend: str, steps: list[tuple[str, Any]], limit: int, ending: str, cold: bool) -> None:
    anyio.run(drive, steps, limit, ending, cold, backend=backend)
