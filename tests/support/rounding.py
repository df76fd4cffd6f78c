"""Comparison of fp32 runs that add the same numbers in another order.

Runs split between workers do so.
"""

ROUNDING = 1e-5
"""Upper limit for `difference`. It depends on the processor's kernels: up to 1.3e-6 was measured.
"""


def difference(one, other):
    """Return the largest difference, relative to the largest value in `other`."""
    return float((one - other).abs().max() / other.abs().max())


def distance(found, expected):
    """Return the norm of the difference, relative to the norm of `expected`."""
    return float((found - expected).norm() / expected.norm())
