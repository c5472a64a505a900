"""Counts and digests of this facility's dataset, where it allows them to be published."""

from __future__ import annotations

from pathlib import Path

from facility.exchange.json_values import values_in
from facility.exchange.messages.dataset_card import SPLITS, DatasetCounts, SplitCounts


def counts_of(dataset: Path) -> DatasetCounts:
    """From `dataset.json`; no text, no file name and no template is among them."""
    manifest = values_in(dataset / "dataset.json")
    splits = {}
    for name in SPLITS:
        if (one := manifest["splits"].get(name)) is not None:
            splits[name] = SplitCounts(
                blocks=one["blocks"], documents=one["documents"], tokens=one["tokens"], sha256=one["sha256"]
            )
    return DatasetCounts(task=manifest["task"], block_tokens=manifest["block_tokens"], splits=splits)
