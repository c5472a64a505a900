"""Counts and digests of a facility's dataset, in the manifest of its update where the facility allows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from facility.exchange.errors import ManifestError
from facility.exchange.messages.manifest import Manifest, with_extra
from facility.exchange.messages.plausible import MOST_COUNT
from facility.exchange.messages.strict_json import Fields
from facility.exchange.task_words import KNOWN

DATASET = "dataset"
"""Key in a manifest's `extra`."""
SPLITS = ("train", "validation")
"""The splits of every dataset."""


@dataclass(frozen=True, kw_only=True)
class SplitCounts:
    """One split."""

    blocks: int
    documents: int
    tokens: int
    sha256: str
    """Digest of the file of token blocks."""


@dataclass(frozen=True, kw_only=True)
class DatasetCounts:
    """The dataset of one facility."""

    task: str
    block_tokens: int
    splits: Mapping[str, SplitCounts] = field(default_factory=dict)


def with_dataset(update: Path, counts: DatasetCounts) -> None:
    """Say in an update's manifest what it was trained on, in numbers."""
    with_extra(update, DATASET, dataclasses.asdict(counts))


def dataset_of(manifest: Manifest) -> dict[str, Any]:
    """What a facility's manifest says, as plain data; {} where it says nothing or nothing possible."""
    raw = manifest.extra.get(DATASET)
    if not isinstance(raw, dict):
        return {}
    try:
        found = Fields(raw=raw, where=DATASET).only(["task", "block_tokens", "splits"])
        splits = {}
        for name, one in found.mapping("splits", 2).items():
            if name not in SPLITS or not isinstance(one, dict):
                return {}
            fields = Fields(raw=one, where=f"{DATASET}: {name}")
            counts = {key: fields.whole(key, most=MOST_COUNT) for key in ("blocks", "documents", "tokens")}
            splits[name] = counts | {"sha256": fields.digest("sha256")}
        return {
            "task": found.one_of("task", "", KNOWN),
            "block_tokens": found.whole("block_tokens", most=10**9),
            "splits": splits,
        }
    except ManifestError:
        return {}
