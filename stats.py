"""Intervals for measured shares."""

import math


def wilson(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share, at 95 % by default: (low, high), both in [0, 1]; (0, 1) where n is 0."""
    if n == 0:
        return 0.0, 1.0
    p, z2 = successes / n, z * z / n
    centre, half = p + z2 / 2, z * math.sqrt(p * (1 - p) / n + z2 / (4 * n))
    return max(0.0, (centre - half) / (1 + z2)), min(1.0, (centre + half) / (1 + z2))
