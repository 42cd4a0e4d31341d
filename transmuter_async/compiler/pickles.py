"""Looking into a pickle without loading it: every global that it names must be on a list.

JAX serializes a program as a pickle. The disk cache is the one place of the library where something is unpickled, so the
bytes are read as opcodes first: only opcodes that such a pickle consists of, and only globals on the list.
"""

from __future__ import annotations

import pickletools

__all__ = ["ALLOWED_GLOBALS", "PickleRefused", "globals_of", "scan"]

ALLOWED_GLOBALS = frozenset(
    {
        ("builtins", "frozenset"),
        ("builtins", "set"),
        ("jax", "P"),
        ("jax._src.core", "ShapedArray"),
        ("jax._src.interpreters.pxla", "AllArgsInfo"),
        ("jax._src.interpreters.pxla", "UnloadedMeshExecutable"),
        ("jax._src.layout", "AutoLayoutSingleton"),
        ("jax._src.layout", "Layout"),
        ("jax._src.linear_util", "DebugInfo"),
        ("jax._src.memory_space", "MemorySpace"),
        ("jax._src.core", "MemorySpace"),
        ("jax._src.mesh", "AbstractMesh"),
        ("jax._src.mesh", "AxisType"),
        ("jax._src.mesh", "ManualAxisType"),
        ("jax._src.core", "ManualAxisType"),
        ("jax._src.named_sharding", "_unpickle_named_sharding"),
        ("jax._src.partition_spec", "PartitionSpec"),
        ("jax._src.sharding_impls", "_unpickle_single_device_sharding"),
        ("jax._src.stages", "ArgInfo"),
        ("jaxlib._jax", "DeviceList"),
        ("ml_dtypes", "bfloat16"),
        ("ml_dtypes", "float8_e4m3fn"),
        ("ml_dtypes", "float8_e4m3fnuz"),
        ("ml_dtypes", "float8_e5m2"),
        ("ml_dtypes", "float8_e5m2fnuz"),
        ("ml_dtypes", "float8_e8m0fnu"),
        ("ml_dtypes", "float4_e2m1fn"),
        ("ml_dtypes", "int2"),
        ("ml_dtypes", "int4"),
        ("ml_dtypes", "uint2"),
        ("ml_dtypes", "uint4"),
        ("numpy", "dtype"),
    }
)
"""What a serialized program of the supported versions of jax names; nothing here runs code of the pickle's choice."""

_STRINGS = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"})
_GETS = frozenset({"BINGET", "LONG_BINGET"})
_OPCODES = _STRINGS | _GETS | frozenset(
    ["PROTO", "FRAME", "STOP", "MEMOIZE", "MARK", "STACK_GLOBAL", "REDUCE", "BUILD", "NEWOBJ", "NEWOBJ_EX", "BINPERSID", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_SET", "ADDITEMS", "FROZENSET"]
)


class PickleRefused(Exception):
    """The pickle holds something that a serialized program does not."""


def globals_of(payload: bytes) -> set[tuple[str, str]]:
    """Every `(module, name)` that a pickle would import.

    Only opcodes that push exactly one item can stand before `STACK_GLOBAL`, so its two strings are the two items before
    it, wherever they come from.

    Raises:
        PickleRefused: An opcode that does not belong, a name that is not plain text, or bytes that are no pickle.
    """
    found: set[tuple[str, str]] = set()
    memo: list[str | None] = []
    pushed: list[str | None] = [None, None]
    try:
        for opcode, argument, _ in pickletools.genops(payload):
            name = opcode.name
            if name not in _OPCODES:
                raise PickleRefused(f"the opcode {name} does not belong into a serialized program")
            if name == "MEMOIZE":
                memo.append(pushed[-1])
                continue
            if name == "STACK_GLOBAL":
                module, attribute = pushed[-2:]
                if module is None or attribute is None:
                    raise PickleRefused("a global is not named by plain text")
                found.add((module, attribute))
            text: str | None = None
            if name in _STRINGS:
                text = str(argument)
            elif name in _GETS and isinstance(argument, int) and argument < len(memo):
                text = memo[argument]
            pushed = [pushed[-1], text]
    except PickleRefused:
        raise
    except Exception as error:  # whatever a damaged stream makes the reader raise
        raise PickleRefused(f"no readable pickle: {error}") from error
    return found


def scan(payload: bytes) -> None:
    """Raise `PickleRefused` where a pickle names anything outside of `ALLOWED_GLOBALS`."""
    strangers = sorted(globals_of(payload) - ALLOWED_GLOBALS)
    if strangers:
        raise PickleRefused(f"it names {', '.join('.'.join(pair) for pair in strangers[:5])}")
