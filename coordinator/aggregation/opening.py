"""The first stage (`coordinator.aggregation.run`): open the model and every update, and refuse what does not fit."""

from __future__ import annotations

import dataclasses
import os
import resource
from collections.abc import Iterable
from pathlib import Path

from coordinator.aggregation.adapters import adapter_base
from coordinator.aggregation.expected import agreed_encoding, agreed_layout
from coordinator.aggregation.matching import match_tensors
from coordinator.aggregation.round import Aggregation
from coordinator.aggregation.unmasking import match_masked
from coordinator.aggregation.updates import Update, open_updates
from coordinator.aggregation.verify import check_variances
from facility.exchange.checkpoints.checkpoint import FLOATS, TensorEntry, open_checkpoint
from facility.exchange.checkpoints.encoded import stored_of
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.errors import ConfigurationError, UpdateRefused
from facility.exchange.files import present
from facility.exchange.messages.manifest import NAME, read_manifest, tensor_files, verify_manifest

FILES_OF_THE_ROUND = 6
"""Files that are open for each of the model's: it, the one that is made, and those of the states before and after."""
USUAL, SPARE = 16, 32
"""Files of tensors of any update; what else is opened on the way."""


def open_round(aggregation: Aggregation, scratch: Path) -> None:
    """Fill in the model, the federated tensors and the updates that fit. `scratch`: for adapters that are new."""
    request, settings = aggregation.request, aggregation.settings
    if request.verify_base:
        verify_manifest(request.base, later=tensor_files(read_manifest(request.base)))
    aggregation.whole = aggregation.source = whole = open_checkpoint(request.base)
    aggregation.sent = read_manifest(request.base) if present.exists(Path(request.base) / NAME) else None
    found = open_updates(request.updates, whole, aggregation.sent, settings, aggregation.drop)
    aggregation.check_enough(found)
    aggregation.with_adapters, found = agreed_encoding(found, request.adapters, aggregation.drop)
    aggregation.check_enough(found)
    if aggregation.with_adapters:
        layout, found = agreed_layout(found, whole, request.adapters, aggregation.drop)
        aggregation.check_enough(found)
        if request.unmasking is not None:  # whole numbers travel; what they stand for is float32
            layout = {name: (dtype if dtype in FLOATS else "F32", shape) for name, (dtype, shape) in layout.items()}
        drawn = request.seed if request.unmasking is None else None  # masked, what is begun with is part of the step
        aggregation.source, begun = adapter_base(whole, layout, scratch, drawn)
        if begun:  # their mean is the first that all share: a server optimizer moves what comes after
            aggregation.settings = settings.without_optimizer()
    patterns = settings.federated
    tensors = aggregation.source.tensors
    aggregation.floats = {n: e for n, e in tensors.items() if e.dtype in FLOATS and patterns.federated(n)}
    if not aggregation.floats:
        raise ConfigurationError(
            "include and exclude leave no floating-point tensor to federate; correct these patterns"
        )
    if request.unmasking is not None:
        request.unmasking.prepare(aggregation.floats, whole)
        aggregation.settings = dataclasses.replace(aggregation.settings, statistics="off")
    aggregation.opened = _openable(_matched(found, aggregation, patterns), aggregation)
    aggregation.check_enough(aggregation.opened)
    aggregation.clock("open")


def _matched(found: list[Update], aggregation: Aggregation, patterns: Patterns) -> list[Update]:
    """The updates whose tensors are the base's, with their places."""
    fitting: list[Update] = []
    for update in found:
        try:
            entries = _entries(update, aggregation, patterns)
            fitting.append(dataclasses.replace(update, entries=entries))
        except UpdateRefused as refusal:
            aggregation.drop(refusal)
    return fitting


def _entries(update: Update, aggregation: Aggregation, patterns: Patterns) -> dict[str, TensorEntry]:
    """Where the update holds each federated tensor. Raises `UpdateRefused`."""
    source, facility, federated = aggregation.source, update.facility, patterns.federated
    if (unmasking := aggregation.request.unmasking) is not None:
        return match_masked(source, update.checkpoint, facility, unmasking.bits, federated=federated)
    entries = match_tensors(source, update.checkpoint, facility, federated=federated)
    check_variances(entries, facility)
    return entries


def _openable(found: list[Update], aggregation: Aggregation) -> list[Update]:
    """The updates whose files can all be open together: a pass has each open to its end.

    While there are more than this process may have, the update of the most files is refused, if these are more than the
    model's own: it would end the round for all, each of whom could be averaged alone.
    """
    limit, own = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _files_of(aggregation.source.tensors.values())
    room = limit - len(os.listdir("/dev/fd")) - own * FILES_OF_THE_ROUND - SPARE
    counts = {update.facility: _files_of(update.entries.values()) for update in found}
    while counts and limit != resource.RLIM_INFINITY and sum(counts.values()) > room:
        facility = max(counts, key=lambda name: counts[name])
        if counts[facility] <= max(own, USUAL):
            break
        aggregation.drop(
            UpdateRefused(
                facility,
                f"its tensors lie in {counts.pop(facility)} files: with those of the others more than may be open here "
                f"({limit}); expected about as many as the model has ({own})",
            )
        )
    return [update for update in found if update.facility in counts]


def _files_of(entries: Iterable[TensorEntry]) -> int:
    return len({stored.file for entry in entries for stored in stored_of(entry)})
