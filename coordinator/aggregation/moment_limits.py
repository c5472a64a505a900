"""How far one facility's second moments may be from the others': judged by what the round's own gradients added.

A facility takes over the shared moments v and returns kept * v + (1 - kept) * g, g the mean square of its own
gradients in the round, kept = beta2^s (1 - beta2^t) / (1 - beta2^(t + s)) after t steps and s more (D. Kingma, J. Ba,
"Adam", ICLR 2015, section 3). Facilities that take unlike steps keep unlike shares, so each is judged by its own.

Moments themselves do not identify an outlier: what one facility added to v in a round is returned by all of them in the
next. A limit of ten times the median of v would let it grow fourfold in each round for ever. Of g nothing comes back:
one of three facilities raises v to ten times what it should be, no further.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

LARGEST = 10.0
"""Times the median facility's g of a parameter. Four languages, two of them known to the model, made them differ by up
to 7 in 30 steps (a vector of norms; matrices by up to 4), and as much in each of 30 rounds of ten steps; two languages
by up to 10.5 in one of 150 rounds of two steps, 6.8 in rounds of ten."""
LEAST_FACILITIES = 3
"""From this number on a median identifies the outlier."""
SLOWEST = 3
"""A facility may have forgotten v as after so many times the median facility's steps; of two, the other's."""


def fresh(mean: float, received: float, kept: float) -> float:
    """g of a parameter: what remains of a facility's mean second moment without the share of the received one.

    The mean itself where none was received.
    """
    return mean if received <= 0 else float(without_received(mean, received, kept))


def without_received(moments: Any, received: Any, kept: float) -> Any:
    """What is left of second moments, numbers or arrays, without the share `kept` of the received ones; at least 0."""
    return np.maximum(0, (moments - kept * received) / (1 - kept)) if kept < 1 else 0 * moments


def most_of(means: Sequence[float], received: float, kept: Sequence[float]) -> float | None:
    """The largest mean that one of three or more facilities may have; None where nothing is known to limit it.

    `kept`: `believed` shares. An honest mean is between `received` and its g, so no larger than the larger of both.
    """
    middle = median(fresh(one, received, share) for one, share in zip(means, kept, strict=True))
    limit = max(received, LARGEST * middle)
    return limit if limit > 0 else None


def least_share(kept: float) -> float:
    """The least share of every received value that honest moments still hold."""
    return kept**SLOWEST


def agree(means: Sequence[float], received: float, kept: Sequence[float]) -> bool:
    """Whether two facilities are so near that neither can be far from what an honest one has; `kept`: `believed`."""
    if received > 0 and max(kept) >= 1.0:  # then nothing is said of the round's gradients
        return False
    low, high = sorted(fresh(one, received, share) for one, share in zip(means, kept, strict=True))
    return high <= LARGEST * low


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What the sizes of one parameter's moment at all facilities allow each of them."""

    most: float | None = None
    """The largest size that counts; None: any."""
    apart: bool = False
    """Two facilities differ by too much to say which is wrong: the moment is not sent."""


def limit_of(sizes: Sequence[float], received: float, kept: Sequence[float]) -> Limit:
    """The limit of one parameter's moment; none where a single facility brings it.

    `sizes`: means of second moments or norms of first ones, of the facilities that bring it; `kept`: the share of what
    they received that is left in each, as `believed`. `received`: the size of that, 0 for none.
    """
    if len(sizes) == 2:
        return Limit(apart=not agree(sizes, received, kept))
    return Limit(most=most_of(sizes, received, kept) if len(sizes) >= LEAST_FACILITIES else None)


def kept_by_all(shares: Sequence[float]) -> float:
    """The share of received moments that is left, from what each facility states; 0 where none brings any."""
    if not shares:
        return 0.0
    return median(shares) if len(shares) >= LEAST_FACILITIES else max(shares)


def believed(shares: Sequence[float]) -> list[float]:
    """The share of received moments that is left at each facility: what it states, which follows from its steps.

    But none has forgotten more than after `SLOWEST` times the steps of the others: one that states less would have the
    mean forget what it received faster than any gradient is believed to be small.
    """
    least = least_share(kept_by_all(shares))
    return [max(share, least) for share in shares]


def recorded(kind: str, *, scaled: Mapping[str, int], apart: int, least: str = "") -> dict[str, Any]:
    """What round.json says of moments that were held to the limits; logs it.

    `kind`: as round.json names them. `scaled`: how many parameters' were held to a limit, by facility. `apart`: of how
    many two facilities' alone were there, too far apart to be sent. `least`: what else they are held to, for the log.
    """
    words = kind.replace("_", " ")
    for facility, count in scaled.items():
        log.warning(
            "%s of %d parameters of %s are more than %g times the median facility's%s: held to the limit",
            words,
            count,
            facility,
            LARGEST,
            least,
        )
    if apart:
        log.warning(
            "%s of %d parameters of two facilities differ by more than %g times: not shared in this round",
            words,
            apart,
            LARGEST,
        )
    return ({f"{kind}_scaled": dict(scaled)} if scaled else {}) | ({f"{kind}_apart": apart} if apart else {})
