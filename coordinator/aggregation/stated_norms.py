"""One pass in place of two: the norms that facilities state of their steps, used first and confirmed before they count.

Clipping needs all norms before the first step is added. Where every update states its own (`step_norms.json`), the
pass that averages begins at once with coefficients that follow from them. It sums the same squares as it goes: where
every bit agrees, the model is the one that two passes would have made; else what was written is discarded, and the
round is planned anew from what was measured.
"""

from __future__ import annotations

import logging

import numpy as np

from coordinator.aggregation.outliers import screened
from coordinator.aggregation.plan import norms_suffice
from coordinator.aggregation.round import Aggregation
from coordinator.aggregation.streams import spans_of
from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.floats import Array
from facility.exchange.checkpoints.step_norms import read_step_norms

log = logging.getLogger(__name__)


class NotConfirmed(Exception):
    """The averaging pass measured other norms, or found an update that is quarantined: plan with what it measured."""


def stated_squares(aggregation: Aggregation) -> Array | None:
    """Squared norm of each opened update's step, as stated; None where one is not known, or norms do not suffice."""
    settings, opened = aggregation.settings, aggregation.opened
    if not norms_suffice(settings, len(opened)) or native.library() is None:
        return None
    if any(entry.dtype not in native.KINDS for entry in aggregation.floats.values()):
        return None
    totals = []
    for update in opened:
        stated = None if update.staleness else read_step_norms(update.directory, update.entries)
        if stated is None:
            return None
        total, place = 0.0, dict.fromkeys(stated, 0)
        for span in spans_of(aggregation.floats):  # as the kernel adds its spans
            total += stated[span.name][place[span.name]]
            place[span.name] += 1
        totals.append(total)
    found = screened(aggregation.names, np.diag(totals), settings.screen, aggregation.work)
    return None if found.quarantined else np.array(totals)


def confirm(aggregation: Aggregation) -> None:
    """After the pass: fill in the outliers that it found. Raises `NotConfirmed` where the plan must be another."""
    stated, gram = aggregation.stated, aggregation.passed.gram
    if stated is None:
        return
    for name, claimed, found in zip(aggregation.names, stated, gram.diagonal(), strict=True):
        if claimed != found:
            log.warning(
                "%s states a squared norm of %.9g for its step, which is %.9g: the round is averaged again",
                name,
                claimed,
                found,
            )
    found_now = screened(aggregation.names, gram, aggregation.settings.screen, aggregation.work)
    if found_now.quarantined or not np.array_equal(stated, gram.diagonal()):
        raise NotConfirmed
    aggregation.suspects = found_now.suspects
