"""Whose update made the aggregation of a round fail."""

from __future__ import annotations

from pathlib import Path

from coordinator.aggregation.request import Request
from coordinator.aggregation.run import aggregate
from coordinator.aggregation.settings import AggregationSettings
from coordinator.config.settings import CoordinatorSettings
from coordinator.steps.arrived import CollectedRound
from facility.exchange.errors import TransientError, UpdateRefused
from facility.exchange.files.durable import scratch_directory
from facility.exchange.files.storage import is_storage, refuses_writes
from facility.exchange.messages.manifest import bytes_of, read_manifest
from facility.exchange.messages.strict_json import clean_text


def to_blame(error: Exception, round: CollectedRound) -> dict[str, str]:
    """The facilities whose updates made the round fail, and why; {} where no facility is at fault.

    An `UpdateRefused` names one. Of any other exception but a fault of this machine, an update is to blame whose plain
    mean with nothing else fails too, while that of another facility succeeds.
    """
    arrived = round.arrived
    if isinstance(error, UpdateRefused):
        return {error.facility: str(error)} if error.facility in arrived.updates else {}
    if isinstance(error, TransientError | MemoryError) or is_storage(error):
        return {}
    failed: dict[str, str] = {}
    for name, update in arrived.updates.items():
        try:
            with scratch_directory(round.archive.path / "blamed") as scratch:
                _alone(round.settings, round.model, name, update, scratch)
        except Exception as own:
            if isinstance(own, TransientError) or refuses_writes(own):
                return {}
            failed[name] = f"its update cannot be averaged: {clean_text(str(own) or repr(own), 300)}"
    return failed if len(failed) < len(arrived.updates) else {}


def _alone(settings: CoordinatorSettings, model: Path, name: str, update: Path, scratch: Path) -> None:
    """The plain mean of one update. Raises whatever is wrong with it."""
    bytes_of(read_manifest(update))
    asked = settings.aggregation
    plain = AggregationSettings(
        rule="mean",
        weights=asked.weights,
        include=asked.include,  # what an update must hold, and of which round it may be
        exclude=asked.exclude,
        batch_norm=asked.batch_norm,
        maximum_staleness=asked.maximum_staleness,
    )
    aggregate(
        Request(base=model, updates={name: update}, out=scratch / "model", settings=plain, adapters=settings.lora)
    )
