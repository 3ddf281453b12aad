"""Two normals from four random words, in fp32: Box and Muller's method with bounded errors.

What goes wrong elsewhere, and not here:

* *tails*: the radius has all of 64 bits, so that it reaches 9.56;
* *small radii*: ``ln u`` of a ``u`` near 1 is taken from ``1 - u``, which is known exactly as an
  integer, so the radius keeps its relative precision down to 0;
* *small sines and cosines*: the angle is reduced to an eighth of a turn as an integer, without an
  error, before it is a number of fp32.

Only conversions, polynomials and one square root take part: all devices have them to 2 units in the
last place, and no approximate logarithm or cosine is used. The radius and both of sine and cosine
are within ``2^-21`` of the truth, relatively; ``tests/ops/test_box_muller.py`` measures ``2^-22``.

Polynomials have the least largest relative error where they are used (Remez' algorithm), below
``2^-25`` for the logarithm, ``2^-27`` for sine and cosine. What is done with integers, and choices
between numbers, are few: they are what a GPU has half as many units for.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _radius(low, high):
    """``sqrt(-2 ln u)`` of ``u = (n + 1/4) / 2^64``."""
    n = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    # As a signed number: 2^64 u below 1/2, and 2^64 (u - 1) from there on, which is negative. So
    # its distance from the end that is nearer is what is rounded.
    x = n.to(tl.int64, bitcast=True).to(tl.float32) + 0.25
    is_near_1 = x < 0
    # Elsewhere u = m 2^e with m in [1/2, 1), from the bits of fp32; e by a number of fp32 whose
    # last place is 1.
    bits = x.to(tl.int32, bitcast=True)
    m = ((bits & 0x7FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    e = ((bits >> 23) + 0x4B000000).to(tl.float32, bitcast=True) - 8388798.0  # 2^23 + 126 + 64
    e = tl.where(is_near_1, 0.0, e)
    y = tl.where(is_near_1, x * 5.421010862427522e-20, m - 1.0)  # 2^-64; both are exact
    # -2 ln(1 + y) / y for y in [-1/2, 0]. Its product with y and the multiple of e are positive.
    series = -2.5153253572123964 + y * (-3.391594096779754 - y * 2.8821953387911154)
    series = 0.4856098440773214 + y * (
        -0.5392264768492816 + y * (-0.40707663158192864 + y * series)
    )
    series = -2.0000000454512383 + y * (0.9999857039753345 + y * (-0.6674012633950643 + y * series))
    return tl.sqrt(e * -1.3862943611198906 + y * series)


@triton.jit
def _turned(radius, low, high):
    """The radius with a sign, and what its products with are the radius times cosine and sine of
    ``2 pi a / 2^64``, ``a`` signed."""
    # The rest behind the nearest quarter of a turn: a's upper two bits are shifted out.
    a = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    x = (a << 2).to(tl.int64, bitcast=True).to(tl.float32) * 8.515303950076e-20  # 2 pi / 2^66
    z = x * x  # x is within pi/4 of 0
    sin = x + x * z * (-0.1666665460967031 + z * (0.008332160768190591 - z * 0.0001951528389211522))
    cos_z = 0.04166664568318747 + z * (-0.0013887316262364633 + z * 2.4433157800923876e-05)
    cos = 1.0 + z * (z * cos_z - 0.5)
    # Bit 30: an odd quarter turns (cos, sin) into (-sin, cos). Bit 31: both change their signs.
    quarter = tl.add(high, 0x20000000, sanitize_overflow=False)  # wraps around
    is_odd = (quarter & 0x40000000) != 0
    radius = (radius.to(tl.uint32, bitcast=True) ^ (quarter & 0x80000000)).to(
        tl.float32, bitcast=True
    )
    return radius, tl.where(is_odd, -sin, cos), tl.where(is_odd, cos, sin)


@triton.jit
def normal_pair(w0, w1, w2, w3, std):
    """Two independent normals of four words, times ``std`` (``reference.py``): three numbers, of
    which the first times the second is one, and the first times the third the other."""
    return _turned(std * _radius(w0, w1), w2, w3)
