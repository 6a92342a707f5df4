"""Hyperbolic space by the formulas as printed, one point at a time."""

import math


def lifted(z, k):
    """exp_0([0, z]) by Eq. 5."""
    length = math.sqrt(k) * math.sqrt(sum(x * x for x in z))
    factor = math.sinh(length) / length if length else 1.0
    return [math.cosh(length) / math.sqrt(k), *(factor * x for x in z)]


def inner(x, y):
    """Eq. 1."""
    return sum(a * b for a, b in zip(x[1:], y[1:], strict=True)) - x[0] * y[0]


def distance(x, y, k):
    """Eq. 3."""
    return math.acosh(max(1.0, -k * inner(x, y))) / math.sqrt(k)


def length(h):
    return math.sqrt(sum(x * x for x in h[1:]))


def exterior(o, n, k):
    """Return the angle of section 4.2, as printed."""
    product = k * inner(o, n)
    cosine = (n[0] + o[0] * product) / (length(o) * math.sqrt(product**2 - 1))
    return math.acos(min(1.0, max(-1.0, cosine)))
