"""Two normals from four random words, in fp32: Box and Muller's method with bounded errors.

What goes wrong elsewhere, and not here:

* *tails*: the radius has all of 64 bits, so that it reaches 9.56;
* *small radii*: ``ln u`` of a ``u`` near 1 is taken from ``1 - u``, which is known exactly as an
  integer, so the radius keeps its relative precision down to 0;
* *small sines and cosines*: the angle is reduced to an eighth of a turn as an integer, without an
  error, before it is a number of fp32.

Only conversions, polynomials, one division and one square root take part: all devices have them to
2 units in the last place, and no approximate logarithm or cosine is used. The radius and both of
sine and cosine are within ``2^-21`` of the truth, relatively; ``tests/ops/test_box_muller.py``
measures ``2^-22``.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _radius(low, high):
    """``sqrt(-2 ln u)`` of ``u = (n + 1/4) / 2^64``."""
    n = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    is_near_1 = high >= 0xB504F334  # u above the root of 1/2
    # Of u, or of 1 - u = (2^64 - 1 - n + 3/4) / 2^64: its distance from the end that is nearer.
    distance = tl.where(is_near_1, n ^ 0xFFFFFFFFFFFFFFFF, n)
    x = distance.to(tl.float32) + tl.where(is_near_1, 0.75, 0.25)
    # u = m 2^e with m between the roots of 1/2 and of 2, from the bits of fp32.
    bits = x.to(tl.int32, bitcast=True) - 0x3F3504F3
    m = ((bits & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True)
    e = tl.where(is_near_1, 0, (bits >> 23) - 64).to(tl.float32)
    y = tl.where(is_near_1, x * -5.421010862427522e-20, m - 1.0)  # -2^-64; both are exact
    # ln(1 + y) = 2 artanh(s), to s^11: what is left out is below 2^-28 of it, as |s| < 0.1716.
    s = y / (y + 2.0)
    z = s * s
    series = 0.4 + z * (0.2857142857142857 + z * (0.2222222222222222 + z * 0.18181818181818182))
    log_m = s * (2.0 + z * (0.6666666666666666 + z * series))
    # ln 2 in two parts: a number of 9 bits, whose product with e is exact, and the rest.
    return tl.sqrt(-2.0 * (e * 0.693359375 + (log_m - e * 0.00021219444005469057)))


@triton.jit
def _turned(low, high):
    """Cosine and sine of ``2 pi a / 2^64``, ``a`` signed."""
    # The nearest quarter of a turn, and the rest; both wrap around.
    quarter = tl.add(high, 0x20000000, sanitize_overflow=False) >> 30
    rest = tl.sub(high, quarter << 30, sanitize_overflow=False).to(tl.int32, bitcast=True)
    a = (rest.to(tl.int64) << 32) | low.to(tl.int64)
    x = a.to(tl.float32) * 3.4061215800304616e-19  # 2 pi / 2^64: within pi/4 of 0
    z = x * x
    # Taylor's series, to x^9 and x^10: what is left out is below 2^-28.
    sin_z = -0.16666666666666666 + z * (
        0.008333333333333333 + z * (-0.0001984126984126984 + z * 2.7557319223985893e-06)
    )
    sin = x + x * z * sin_z
    cos_z = 0.041666666666666664 + z * (
        -0.001388888888888889 + z * (2.48015873015873e-05 - z * 2.755731922398589e-07)
    )
    cos = 1.0 + z * (z * cos_z - 0.5)
    is_odd = (quarter & 1) != 0
    first = tl.where(is_odd, sin, cos).to(tl.uint32, bitcast=True)
    second = tl.where(is_odd, cos, sin).to(tl.uint32, bitcast=True)
    # Signs by quarter: the cosine is negative in 1 and 2, the sine in 2 and 3.
    first ^= ((quarter + 1) & 2) << 30
    second ^= (quarter & 2) << 30
    return first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)


@triton.jit
def normal_pair(w0, w1, w2, w3):
    """Two independent normals of four words; see ``reference.py``."""
    radius = _radius(w0, w1)
    cos, sin = _turned(w2, w3)
    return radius * cos, radius * sin
