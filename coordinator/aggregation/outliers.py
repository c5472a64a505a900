"""Which updates are out of line with the others: far too long or short, or pointing the other way.

A named, configurable test on norms and cosines; it reports, and on request leaves the update out of the round. It is no
proof of hostility, and a careful attacker passes it: the robust rules are for those.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordinator.config.aggregation import ScreenSettings
from facility.exchange.checkpoints.floats import Array
from facility.exchange.errors import InputError


def suspects(names: Sequence[str], gram: Array, weights: Sequence[float], settings: ScreenSettings) -> dict[str, str]:
    """Reasons by facility. Norms are looked at first; cosines then among those whose norms are in line."""
    if settings.action == "off" or len(names) < settings.minimum_updates:
        return {}
    found: dict[str, str] = {}
    norms = np.sqrt(np.maximum(gram.diagonal(), 0))
    median = float(np.median(norms))
    if settings.norm_ratio and median > 0:
        for name, norm in zip(names, norms, strict=True):
            ratio = float(norm) / median
            if ratio > settings.norm_ratio or ratio < 1 / settings.norm_ratio:
                found[name] = (
                    f"norm {norm:.4g} is {ratio:.3g} times the median {median:.4g}, allowed are "
                    f"{1 / settings.norm_ratio:.3g} to {settings.norm_ratio:g}"
                )
    left = [i for i, name in enumerate(names) if name not in found]
    if settings.cosine_minimum > -1 and len(left) >= settings.minimum_updates:
        for i in left:
            others = np.array([weights[j] if j in left and j != i else 0.0 for j in range(len(names))])
            product, length = float(gram[i] @ others), float(np.sqrt(max(others @ gram @ others, 0.0)))
            if norms[i] > 0 and length > 0 and product / (norms[i] * length) < settings.cosine_minimum:
                found[names[i]] = (
                    f"cosine {product / (norms[i] * length):.3f} to the mean of the others, "
                    f"allowed is {settings.cosine_minimum:g} or more"
                )
    return found


def quarantined(names: Sequence[str], found: dict[str, str], settings: ScreenSettings) -> list[int]:
    """Indices of the updates that stay. Raises `InputError` when the screen would remove half of them or more."""
    if settings.action != "quarantine" or not found:
        return list(range(len(names)))
    if 2 * len(found) >= len(names):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(found.items()))
        raise InputError(
            f"the screen would quarantine {len(found)} of {len(names)} updates ({reasons}): with no majority in line, "
            "look at the facilities, or set screen.action to 'report'"
        )
    return [i for i, name in enumerate(names) if name not in found]
