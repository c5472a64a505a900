"""Second moments under masks: of an update their form alone is checked; the sum is unmasked and held to limits.

A facility keeps to its limits itself (`facility.masking.mask_moments`), and one that lies can add any number modulo
2^64 to the sum. What every honest sum keeps to is public, so the mean is held to it: none is below zero or above the
range, all values of all parameters together are at most the range (the squared norm of a gradient, which was clipped),
a parameter's mean grows at most `GROWTH`-fold in a round, and of what was received no less is left than can be
(`moment_limits.least_share`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from coordinator.aggregation.moment_limits import least_share
from coordinator.aggregation.round import Aggregation
from coordinator.aggregation.unmasking import Unmasking
from facility.exchange.checkpoints.checkpoint import TensorEntry, open_checkpoint, read_exactly
from facility.exchange.checkpoints.codecs import PART
from facility.exchange.checkpoints.floats import Array
from facility.exchange.checkpoints.second_moments import (
    FOLDER,
    Factors,
    has_factors,
    kept_of,
    read_factors,
    steps_of,
    write_factors,
)
from facility.exchange.errors import CheckpointError, UpdateRefused
from facility.exchange.masking.moments import BITS, MARK, Place, Units, add_streams, moment_places, seed_of
from facility.exchange.masking.streams import DTYPES, MaskBuffer
from facility.exchange.messages.masking import GROWTH, MaskedMoments

log = logging.getLogger(__name__)
IMPOSSIBLE, LIMITED = "second_moments_impossible", "second_moments_limited"
"""In the round's details: of how many parameters the mean is none of second moments, so that it is not sent, and of how
many it was held to the limits."""
ROUNDING = 1e-6
"""Relative, of means that are stored in float32."""


def check_masked_moments(
    update: Path, shapes: Mapping[str, tuple[int, ...]], facility: str, moments: MaskedMoments | None
) -> dict[str, TensorEntry]:
    """The masked second moments of an update by parameter. Raises `UpdateRefused` where they are not those agreed.

    `shapes`: of its masked tensors. `moments`: None where none are sent in this round.
    """
    if (moments is not None) != has_factors(update):
        holds, wanted = ("masked second moments", "none") if moments is None else ("no masked second moments", "some")
        raise UpdateRefused(facility, f"it holds {holds}, expected {wanted} in this round as agreed")
    if moments is None:
        return {}
    try:
        found = open_checkpoint(update / FOLDER).tensors
        steps_of(update)
    except CheckpointError as error:
        raise UpdateRefused(facility, f"its masked second moments cannot be used: {error}") from None
    laid = moment_places(shapes)
    if odd := sorted({name + MARK for name in laid} ^ found.keys()):
        raise UpdateRefused(
            facility, f"its masked second moments are not the tensors': {len(odd)} names differ, such as {odd[:3]}"
        )
    for name, place in laid.items():
        entry = found[name + MARK]
        if (entry.dtype, tuple(entry.shape)) != (DTYPES[BITS], (place.values,)):
            raise UpdateRefused(
                facility,
                f"its masked second moments of {name!r} are {entry.dtype} {list(entry.shape)}, expected "
                f"{DTYPES[BITS]} {[place.values]}",
            )
    return {name: found[name + MARK] for name in laid}


def write_unmasked_moments(aggregation: Aggregation, model: Path, unmasking: Unmasking) -> None:
    """Write the weighted mean of the updates' second moments below `model`; nothing where none are sent."""
    if unmasking.moments is None:
        return
    shapes = {name: tuple(entry.shape) for name, entry in aggregation.floats.items()}
    means, impossible = unmasked(aggregation, shapes, unmasking, unmasking.moments.range)
    whole = aggregation.whole
    held, limited = within(
        means,
        received=received_by(whole.directory, {name: tuple(entry.shape) for name, entry in whole.tensors.items()}),
        floor=least_share(median(kept_of(update.directory) for update in aggregation.opened)),
        largest=unmasking.moments.range,
        sizes={name: math.prod(shape) for name, shape in shapes.items()},
    )
    record: dict[str, Any] = {IMPOSSIBLE: impossible} if impossible else {}
    aggregation.moments = record | ({LIMITED: limited} if limited else {})
    if impossible:
        log.warning(
            "unmasked second moments of %d parameters are none: some facility lied; not shared in this round",
            impossible,
        )
    if limited:
        log.warning("unmasked second moments of %d parameters are held to the limits of every honest sum", limited)
    if held:
        write_factors(model, held, steps=median(steps_of(update.directory) for update in aggregation.opened))


def unmasked(
    aggregation: Aggregation, shapes: Mapping[str, tuple[int, ...]], unmasking: Unmasking, largest: float
) -> tuple[dict[str, Factors], int]:
    """The weighted mean by parameter, over the facilities that have any of it, and how many cannot be means."""
    units = Units(largest=largest, weights=unmasking.weights)
    weight = math.fsum(unmasking.weights[name] for name in unmasking.survivors)
    streams = [(sign, seed_of(seed)) for sign, seed in unmasking.seeds]
    buffer = MaskBuffer(PART, BITS)
    means: dict[str, Factors] = {}
    impossible = 0
    with ExitStack() as stack:
        sent = [
            check_masked_moments(update.directory, shapes, update.facility, unmasking.moments)
            for update in aggregation.opened
        ]
        files = {entry.file for entries in sent for entry in entries.values()}
        opened = {path: stack.enter_context(open(path, "rb", buffering=0)).fileno() for path in files}
        for name, place in moment_places(shapes).items():
            total = np.zeros(place.values, np.uint64)
            for entries in sent:
                total += _numbers(entries[name], opened[entries[name].file])
            add_streams(total, place, streams, buffer)
            mean = factors_from(place, units.decode(total, weight), largest)
            if mean is None:
                impossible += 1
            elif mean.rows.any():
                means[name] = mean
    return means, impossible


def _numbers(entry: TensorEntry, descriptor: int) -> Array:
    numbers = np.empty(entry.elements, np.uint64)
    read_exactly(descriptor, numbers.data.cast("B"), entry.start, entry.file)
    return numbers


def factors_from(place: Place, means: Array, largest: float) -> Factors | None:
    """Factors from a parameter's unmasked means, zeros where no facility has any; None where they are none."""
    share = float(means[-1]) / largest
    if share == 0 and not means.any():
        return place.split(means, 1.0)
    if (
        not 0 < share <= 1 + ROUNDING
        or (means < 0).any()
        or means[:-1].max(initial=0.0) > share * largest * (1 + ROUNDING)
    ):
        return None
    found = place.split(means, share)
    return found if found.agree else None


def received_by(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Factors]:
    """Second moments in `directory` that the facilities began the round with; {} where it holds none."""
    return read_factors(directory, shapes)[0] if has_factors(directory) else {}


def within(
    means: Mapping[str, Factors],
    *,
    received: Mapping[str, Factors],
    floor: float,
    largest: float,
    sizes: Mapping[str, int],
) -> tuple[dict[str, Factors], int]:
    """Means held to the limits of every honest sum, and of how many parameters they were not so."""
    found, limited = {}, 0
    for name, mean in means.items():
        one = mean
        if (before := received.get(name)) is not None:
            one = one.at_least(before, floor)
            if before.mean > 0:
                one = one.at_most(GROWTH * before.mean)
        found[name] = one
        limited += one is not mean
    whole = math.fsum(one.mean * sizes[name] for name, one in found.items())
    if whole > largest * (1 + ROUNDING):
        found = {name: one.at_most(one.mean * largest / whole) for name, one in found.items()}
        limited = len(found)
    return found, limited
