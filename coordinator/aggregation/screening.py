"""The second stage of an aggregation (`coordinator.aggregation.run`): what each update counts, and which are outliers.

Where the rule, clipping or outlier detection needs to know all steps before they are combined, one pass over all
tensors measures them here; it writes nothing.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.aggregation import kernel
from coordinator.aggregation.outliers import screened
from coordinator.aggregation.plan import needs_histograms, needs_measuring, needs_momentum, needs_tensor_products
from coordinator.aggregation.round import Aggregation
from coordinator.aggregation.server_optimizers.registry import SERVER_OPTIMIZERS, build
from coordinator.aggregation.sources import DamagedUpdate, Sources, verify_sources
from coordinator.aggregation.state import fitting, open_state
from coordinator.aggregation.stated_norms import confirm, stated_squares
from coordinator.aggregation.updates import Update, weights_of
from coordinator.aggregation.verify import check_finite, check_unaltered
from coordinator.aggregation.work import Malformed, NotFinite, Passed, Work
from facility.exchange.checkpoints import magnitudes
from facility.exchange.checkpoints.checkpoint import EndsEarly, TensorEntry
from facility.exchange.errors import UpdateRefused, first_line
from facility.exchange.masking.weights import cap_weights
from facility.exchange.messages.manifest import NAME

MOST_WAITING = 6
"""Updates of which a second thread's pieces may wait in memory to be hashed."""
MOST_APART = 32
"""Updates whose inner products may wait in memory to be added."""


def screen_round(aggregation: Aggregation) -> None:
    """Fill in weights, measurements and outliers; updates that are quarantined leave the round."""
    settings = aggregation.settings
    aggregation.measured = aggregation.histograms = None
    aggregation.suspects, aggregation.quarantined, aggregation.stated = {}, {}, None
    if (unmasking := aggregation.request.unmasking) is not None:
        aggregation.weights = unmasking.shares
        return
    _weigh(aggregation)
    product = aggregation.with_adapters and settings.lora == "product"
    if not (product or needs_measuring(settings, len(aggregation.opened))):
        return
    known, aggregation.refuted = aggregation.refuted, None
    if known is None and (stated := stated_squares(aggregation)) is not None:
        aggregation.stated = stated
        return
    if known is not None and len(known.gram) == len(aggregation.opened):
        aggregation.measured = known
    else:
        _measure(aggregation)
    aggregation.clock("measure")
    assert aggregation.measured is not None
    gram = aggregation.measured.gram
    found = screened(aggregation.names, gram, settings.screen, aggregation.work)
    aggregation.suspects, aggregation.quarantined = found.suspects, found.quarantined
    kept = [i for i, name in enumerate(aggregation.names) if name not in found.quarantined]
    if len(kept) < len(aggregation.opened):
        if aggregation.histograms is not None:
            aggregation.histograms = [aggregation.histograms[i] for i in kept]
        aggregation.opened = [aggregation.opened[i] for i in kept]
        chosen = np.ix_(kept, kept)
        by_tensor = {name: one[chosen] for name, one in aggregation.measured.by_tensor.items()}
        with_momentum = [*kept, len(gram)]
        along = {name: one[with_momentum] for name, one in aggregation.measured.along_momentum.items()}
        aggregation.measured = dataclasses.replace(
            aggregation.measured, gram=gram[chosen], by_tensor=by_tensor, along_momentum=along
        )
        _weigh(aggregation)


def screen_afterwards(aggregation: Aggregation) -> None:
    """Report outliers from what the writing pass measured, where nothing was measured before it."""
    if aggregation.stated is not None:
        confirm(aggregation)
    elif aggregation.measured is None and aggregation.settings.statistics == "exact":
        found = screened(aggregation.names, aggregation.passed.gram, aggregation.settings.screen, aggregation.work)
        aggregation.suspects = found.suspects


def threads_of(aggregation: Aggregation) -> int:
    """Worker threads: as many as pay.

    One where many updates are verified: a digest is made of bytes in their order, and what a second thread reads too
    early waits in memory, of every update. One where there are very many: inner products that wait for their turn grow
    with the square of their number. One where masks come off: their streams are made in order at twice the speed, by a
    library that holds the interpreter's lock meanwhile.
    """
    count = len(aggregation.opened)
    if aggregation.request.unmasking is not None:
        return aggregation.request.threads or 1
    many = (aggregation.request.verify_updates and count > MOST_WAITING) or count > MOST_APART
    return aggregation.request.threads or (1 if many else min(2, os.cpu_count() or 1))


def run_pass(aggregation: Aggregation, work: Work) -> Passed:
    """A pass over the tensors, whose faults name the facility."""
    opened = aggregation.opened
    try:
        passed = kernel.run(work, threads=threads_of(aggregation))
    except NotFinite as error:
        verify_sources(aggregation.request)
        look_into(aggregation, opened)
        if error.update is None:
            raise
        raise UpdateRefused(
            opened[error.update].facility, f"tensor {error.name!r} holds NaN, infinity or absurdly large values"
        ) from None
    except (EndsEarly, FileNotFoundError) as error:  # it was taken away, or cut short, as it was read
        place = error.file if isinstance(error, EndsEarly) else Path(os.fsdecode(error.filename or ""))
        owner = next((one for one in opened if place.is_relative_to(one.directory)), None)
        if owner is None:
            raise
        raise (DamagedUpdate if aggregation.request.verify_updates else UpdateRefused)(
            owner.facility, f"its {place.name} was altered as it was read: {first_line(error)}"
        ) from None
    except Malformed as error:
        look_into(aggregation, opened)
        raise UpdateRefused(opened[error.update].facility, str(error)) from None
    for update, squared in zip(opened, passed.gram.diagonal(), strict=True):
        if not math.isfinite(squared):
            verify_sources(aggregation.request)
            look_into(aggregation, [update])
            check_finite(update.entries, update.facility)  # names the tensor
            raise UpdateRefused(update.facility, "it holds NaN, infinity or absurdly large values")
    return passed


def look_into(aggregation: Aggregation, updates: Sequence[Update]) -> None:
    """Raise `DamagedUpdate` for the first that is altered, or holds NaN or infinity, where nobody has looked before."""
    if not aggregation.request.verify_updates:
        return
    try:
        for update in updates:
            if (update.directory / NAME).exists():
                check_unaltered(update.directory, update.facility)
        for update in updates:
            check_finite(update.entries, update.facility)
    except UpdateRefused as refusal:
        raise DamagedUpdate(refusal.facility, refusal.reason) from None


def _weigh(aggregation: Aggregation) -> None:
    """The share of each update; one that has no weight is refused, one that has too much is capped."""
    while True:
        try:
            shares = weights_of(aggregation.opened, aggregation.settings)
            break
        except UpdateRefused as refusal:
            aggregation.drop(refusal)
            aggregation.check_enough(aggregation.opened)
    most = aggregation.settings.maximum_share
    aggregation.weights, aggregation.capped = shares, {}
    if len(shares) >= aggregation.settings.screen.minimum_updates and max(shares) > most:
        aggregation.weights = cap_weights(shares, most)
        pairs = zip(aggregation.names, shares, aggregation.weights, strict=True)
        aggregation.capped = {name: share for name, share, after in pairs if after < share}


def _measure(aggregation: Aggregation) -> None:
    """One pass that only reads: inner products of the steps, and histograms where the rule wants them."""
    histograms = [np.zeros(magnitudes.BINS, np.int64) for _ in aggregation.opened]
    lock = threading.Lock()

    def observe(steps: Any) -> None:
        for total, row in zip(histograms, steps, strict=True):
            counts = magnitudes.histogram(row)
            with lock:
                total += counts

    wanted, momentum = needs_histograms(aggregation.settings), needs_momentum(aggregation.settings)
    slots, starts = _momentum(aggregation) if momentum else ([], ())
    sources = Sources()
    if aggregation.request.verify_updates:
        sources.promise_updates(aggregation.opened, aggregation.verified)
    work = Work(
        base=aggregation.floats,
        updates=[update.entries for update in aggregation.opened],
        float64=aggregation.settings.accumulate == "float64",
        observe=observe if wanted else None,
        by_tensor=needs_tensor_products(aggregation.settings),
        slots=slots,
        slot_starts=starts,
        momentum=momentum,
        hashed=sources.hashed,
    )
    aggregation.measured = run_pass(aggregation, work)
    sources.check()
    aggregation.verified.update(sources.facilities.values())
    aggregation.histograms = histograms if wanted else None


def _momentum(aggregation: Aggregation) -> tuple[list[Mapping[str, TensorEntry]], tuple[float, ...]]:
    """The server optimizer's velocity of the round before, as the kernel takes it."""
    settings = aggregation.settings
    optimizer = SERVER_OPTIMIZERS.get(settings.server_optimizer)
    _, starts = build(settings.server_optimizer, aggregation.number, settings.values_of(optimizer))
    (name,) = optimizer.slots[:1]
    # The pass that writes compares the whole state as it reads it: no other reading is needed here.
    old = open_state(aggregation.request.state_in, aggregation.sent, [name], Sources())
    return [fitting(old.get(name), aggregation.floats)], starts[:1]
