"""What holds in every test of operators: a loop of JAX is never traced inline, which would unroll it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest


@pytest.fixture(autouse=True)
def loops_are_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    def watched(loop: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            assert not jax.config.jax_disable_jit, (
                f"lax.{loop.__name__} in an operator that is not registered with loops=True"
            )
            return loop(*args, **kwargs)

        return call

    for name in ("scan", "map", "fori_loop", "while_loop"):
        monkeypatch.setattr(jax.lax, name, watched(getattr(jax.lax, name)))
