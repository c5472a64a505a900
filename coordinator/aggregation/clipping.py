"""Norm clipping of updates: no facility moves the model further than a limit.

Z. Sun, P. Kairouz, A. T. Suresh, H. B. McMahan, "Can you really backdoor federated learning?", 2019,
arXiv 1911.07963, section 4:  step / max(1, norm / limit).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median  # numpy's loads numpy.ma, 2 MB


def limit_of(norms: Sequence[float], *, clip_norm: float, clip_ratio: float) -> float:
    """The smaller of the absolute limit and the multiple of the median norm; infinity when both are off.

    A median of zero (most facilities did not move) limits nothing.
    """
    limits = [clip_norm] if clip_norm else []
    if clip_ratio and (middle := median(norms)) > 0:
        limits.append(clip_ratio * middle)
    return min(limits, default=float("inf"))


def factors(norms: Sequence[float], limit: float) -> list[float]:
    """What each update is multiplied by."""
    return [1.0 if norm <= limit else limit / norm for norm in norms]
