"""What `crossfed check` reads of a probe's answers."""

from __future__ import annotations

from typing import Any

from coordinator.preflight.probe_answer import DatasetAnswer, DiskAnswer, ProbeAnswer, _dataset, _disk
from facility.exchange.messages.strict_json import Fields


def dataset_answer(raw: dict[str, Any]) -> DatasetAnswer:
    """Of what `facility.probe` says of a dataset."""
    return _dataset(Fields(raw=raw, where="the probe's answer: dataset"))


def disk_answer(raw: dict[str, Any]) -> DiskAnswer:
    """Of what it says of a file system."""
    return _disk(Fields(raw=raw, where="the probe's answer: disk"))


def honest_answer(dataset: DatasetAnswer) -> ProbeAnswer:
    """Of a facility that has this dataset."""
    disk = DiskAnswer(writable=True, free=10**12)
    return ProbeAnswer(crossfed="1", python="3.12.1", packages={}, formats={}, dataset=dataset, disk=disk)
