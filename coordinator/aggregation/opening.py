"""The first stage (`coordinator.aggregation.run`): open the model and every update, and refuse what does not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from coordinator.aggregation.adapters import adapter_base
from coordinator.aggregation.expected import agreed_encoding, agreed_layout
from coordinator.aggregation.matching import match_tensors
from coordinator.aggregation.round import Aggregation
from coordinator.aggregation.unmasking import match_masked
from coordinator.aggregation.updates import Update, open_updates
from coordinator.aggregation.verify import check_variances
from facility.exchange.checkpoints.checkpoint import FLOATS, TensorEntry, open_checkpoint
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.errors import ConfigurationError, UpdateRefused
from facility.exchange.files import present
from facility.exchange.messages.manifest import NAME, read_manifest, tensor_files, verify_manifest


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
        aggregation.source, begun = adapter_base(whole, layout, scratch)
        if begun:  # there is no step yet that a server optimizer could take
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
    aggregation.opened = _matched(found, aggregation, patterns)
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
