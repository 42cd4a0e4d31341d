"""Comparisons, logic, bits, and the choice between two values."""

from __future__ import annotations

import numpy as np

from transmuter_async.operators.arguments import align_legacy
from transmuter_async.operators.numeric import widen
from transmuter_async.operators.registry import operator, xp

# --- comparisons ------------------------------------------------------------------------------------------------------


@operator("Equal", since_version=7)
def equal_7(A, B, /):
    """A == B; NaN equals nothing. Strings are compared since version 19."""
    return xp(A, B).equal(A, B).astype(np.bool_)


@operator("Equal", since_version=1)
def equal_1(A, B, /, *, axis=None, broadcast=0):
    return equal_7(*align_legacy(A, B, axis, broadcast))


@operator("Greater", since_version=7)
def greater_7(A, B, /):
    """A > B; false where one is NaN."""
    return xp(A, B).greater(A, B)


@operator("Greater", since_version=1)
def greater_1(A, B, /, *, axis=None, broadcast=0):
    return greater_7(*align_legacy(A, B, axis, broadcast))


@operator("GreaterOrEqual", since_version=12)
def greater_or_equal_12(A, B, /):
    """A >= B; false where one is NaN."""
    return xp(A, B).greater_equal(A, B)


@operator("Less", since_version=7)
def less_7(A, B, /):
    """A < B; false where one is NaN."""
    return xp(A, B).less(A, B)


@operator("Less", since_version=1)
def less_1(A, B, /, *, axis=None, broadcast=0):
    return less_7(*align_legacy(A, B, axis, broadcast))


@operator("LessOrEqual", since_version=12)
def less_or_equal_12(A, B, /):
    """A <= B; false where one is NaN."""
    return xp(A, B).less_equal(A, B)


@operator("IsNaN", since_version=9)
def is_nan_9(X, /):
    """Where X is NaN; the float8 kinds since version 20."""
    return xp(X).isnan(widen(X))


@operator("IsInf", since_version=10)
def is_inf_10(X, /, *, detect_negative=1, detect_positive=1):
    """Where X is infinite, of the signs that are asked for; most float8 kinds have no infinity."""
    module, wide = xp(X), widen(X)
    if detect_negative and detect_positive:
        return module.isinf(wide)
    if not detect_negative and not detect_positive:
        return module.zeros_like(wide, dtype=np.bool_)
    return wide == np.asarray(np.inf if detect_positive else -np.inf, wide.dtype)


# --- logic ------------------------------------------------------------------------------------------------------------


@operator("And", since_version=7)
def and_7(A, B, /):
    """Both are true."""
    return xp(A, B).logical_and(A, B)


@operator("And", since_version=1)
def and_1(A, B, /, *, axis=None, broadcast=0):
    return and_7(*align_legacy(A, B, axis, broadcast))


@operator("Or", since_version=7)
def or_7(A, B, /):
    """At least one is true."""
    return xp(A, B).logical_or(A, B)


@operator("Or", since_version=1)
def or_1(A, B, /, *, axis=None, broadcast=0):
    return or_7(*align_legacy(A, B, axis, broadcast))


@operator("Xor", since_version=7)
def xor_7(A, B, /):
    """One of the two is true."""
    return xp(A, B).logical_xor(A, B)


@operator("Xor", since_version=1)
def xor_1(A, B, /, *, axis=None, broadcast=0):
    return xor_7(*align_legacy(A, B, axis, broadcast))


@operator("Not", since_version=1)
def not_1(X, /):
    """The opposite."""
    return xp(X).logical_not(X)


# --- bits -------------------------------------------------------------------------------------------------------------


@operator("BitwiseAnd", since_version=18)
def bitwise_and_18(A, B, /):
    """Bits that both have."""
    return xp(A, B).bitwise_and(A, B)


@operator("BitwiseOr", since_version=18)
def bitwise_or_18(A, B, /):
    """Bits that at least one has."""
    return xp(A, B).bitwise_or(A, B)


@operator("BitwiseXor", since_version=18)
def bitwise_xor_18(A, B, /):
    """Bits that one of the two has."""
    return xp(A, B).bitwise_xor(A, B)


@operator("BitwiseNot", since_version=18)
def bitwise_not_18(X, /):
    """Every bit the opposite."""
    return xp(X).bitwise_not(X)


# --- choice -----------------------------------------------------------------------------------------------------------


@operator("Where", since_version=9)
def where_9(condition, X, Y, /):
    """X where the condition holds, else Y; all three broadcast. What is not chosen may be NaN."""
    return xp(condition, X, Y).where(condition, X, Y)
