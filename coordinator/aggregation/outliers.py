"""Outlier detection: updates far longer or shorter than the others, or pointing the other way.

Norms are compared with the median norm; directions by the median of an update's cosines to the others, which one
hostile update cannot move. Steps of facilities with unlike data are nearly orthogonal (cosines of 0 to 0.4) and, at
equal numbers of steps, within a factor of 2 of the median norm; so the defaults report what is 5 times longer or
shorter, and quarantine only what is 10 times longer, or has a median cosine below -0.5. What is shorter cannot harm the
model, and what is up to 10 times longer is clipped to the median norm. Where facilities take unlike numbers of steps in
a round, a norm grows with them, between their root and their number; an update is then as long as the more favourable
of its norm and its norm per step says.

It does not prove hostility, and a careful attacker passes it: the robust rules are for those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from coordinator.aggregation.settings import ScreenSettings
from facility.exchange.checkpoints.floats import Array
from facility.exchange.errors import InputError

FAR = 2.0
"""Times `norm_ratio`: from there on, `auto` quarantines."""


@dataclass(frozen=True, kw_only=True)
class Screened:
    """Outliers by facility, with the reason."""

    suspects: dict[str, str] = field(default_factory=dict)
    quarantined: dict[str, str] = field(default_factory=dict)
    """Outliers that are left out of the round, with the reason."""


def screened(
    names: Sequence[str], gram: Array, settings: ScreenSettings, work: Sequence[float] | None = None
) -> Screened:
    """Which updates are outliers, by the inner products `gram` of their steps.

    `work`: of each update, in any unit; None: all did as much.

    Raises `InputError` when `quarantine` was asked for and would leave out half of them or more.
    """
    if settings.action == "off" or len(names) < 2:
        return Screened()
    norms = np.sqrt(np.maximum(gram.diagonal(), 0))
    if len(names) < settings.minimum_updates:
        return Screened(suspects=_of_few(names, norms, settings, work))
    ratios = _ratios(norms, work)
    long = _out_of_length(names, norms, ratios, settings)
    turned = _turned(names, gram, norms, settings, exclude=long)
    suspects = long | turned
    if settings.action == "report" or not suspects:
        return Screened(suspects=suspects)
    if settings.action == "quarantine":
        _check_majority(suspects, names)
        return Screened(suspects=suspects, quarantined=suspects)
    far = {
        n: suspects[n]
        for n, ratio in zip(names, ratios, strict=True)
        if n in long and ratio > FAR * settings.norm_ratio
    }
    chosen = far | turned
    return Screened(suspects=suspects, quarantined=chosen if 2 * len(chosen) < len(names) else {})


def _of_few(
    names: Sequence[str], norms: Array, settings: ScreenSettings, work: Sequence[float] | None
) -> dict[str, str]:
    """With too few for a majority, only what is far longer than the shortest is reported."""
    least = float(norms.min())
    apart = 1.0 if work is None else max(work) / min(work)
    if not settings.norm_ratio or least <= 0:
        return {}
    return {
        name: f"norm {norm:.4g} is {norm / least:.3g} times the least, {least:.4g}; {len(names)} updates have no "
        "majority"
        for name, norm in zip(names, norms, strict=True)
        if norm > settings.norm_ratio * least * apart
    }


def _ratios(norms: Array, work: Sequence[float] | None = None) -> list[float]:
    """Multiples of the median norm; with `work`, of the median norm per work where that is nearer to 1."""
    middle = median(norms.tolist())
    plain = [float(norm) / middle if middle > 0 else 1.0 for norm in norms]
    if work is None or middle <= 0:
        return plain
    return [min(pair, key=_length) for pair in zip(plain, _ratios(norms / np.asarray(work)), strict=True)]


def _length(ratio: float) -> float:
    """How far a ratio is from 1, up or down."""
    return max(ratio, 1 / ratio) if ratio > 0 else float("inf")


def _out_of_length(
    names: Sequence[str], norms: Array, ratios: Sequence[float], settings: ScreenSettings
) -> dict[str, str]:
    limit = settings.norm_ratio
    return {
        name: f"norm {norm:.4g} is {ratio:.3g} times the median {median(norms.tolist()):.4g}, allowed are "
        f"{1 / limit:.3g} to {limit:g}"
        for name, norm, ratio in zip(names, norms, ratios, strict=True)
        if limit and not 1 / limit <= ratio <= limit
    }


def _turned(
    names: Sequence[str], gram: Array, norms: Array, settings: ScreenSettings, exclude: Mapping[str, str]
) -> dict[str, str]:
    """Updates that point away from most of the others, among those whose norms are in line."""
    left = [i for i, name in enumerate(names) if name not in exclude and norms[i] > 0]
    if settings.cosine_minimum <= -1 or len(left) < settings.minimum_updates:
        return {}
    found = {}
    for i in left:
        cosine = float(median(gram[i, j] / (norms[i] * norms[j]) for j in left if j != i))
        if cosine < settings.cosine_minimum:
            found[names[i]] = (
                f"median cosine {cosine:.3f} to the others, allowed is {settings.cosine_minimum:g} or more"
            )
    return found


def _check_majority(found: Mapping[str, str], names: Sequence[str]) -> None:
    if 2 * len(found) >= len(names):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(found.items()))
        raise InputError(
            f"the screen would quarantine {len(found)} of {len(names)} updates ({reasons}): with no majority in line, "
            "look at the facilities, or set screen.action to 'report'"
        )
