"""The Threefry-2x32 counter-based generator, the same bits in numpy and in JAX.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), 20 rounds. `fold_in` equals
`jax.random.fold_in` on raw threefry keys.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from transmuter_async.operators.registry import xp

__all__ = ["fold_in", "threefry2x32"]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def threefry2x32(key: Any, first: Any, second: Any) -> tuple[Any, Any]:
    """Encrypt counters.

    Args:
        key: (2,) uint32.
        first: uint32 array, high word of each counter.
        second: uint32 array of the same shape, low word.

    Returns:
        Two uint32 arrays of that shape.
    """
    module = xp(key, first, second)
    k0, k1 = key[0], key[1]
    with np.errstate(over="ignore"):
        schedule = (k0, k1, k0 ^ k1 ^ _PARITY)
        x0 = module.asarray(first, np.uint32) + schedule[0]
        x1 = module.asarray(second, np.uint32) + schedule[1]
        for group in range(5):
            for rotation in _ROTATIONS[group % 2]:
                x0 = x0 + x1
                x1 = (x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))
                x1 = x0 ^ x1
            x0 = x0 + schedule[(group + 1) % 3]
            x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def fold_in(key: Any, number: Any) -> Any:
    """A new key from a key, (2,) uint32, and an integer, host or traced."""
    low: Any
    if isinstance(number, jax.Array):
        low = number.astype(np.uint32)
    else:
        low = np.asarray(int(number) & 0xFFFFFFFF, np.uint32)
    first, second = threefry2x32(key, xp(low).zeros_like(low), low)
    return xp(first, second).stack([first, second])
