"""`round.json`: what went into a round's model and how."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from facility.exchange.files.durable import write_json

FORMAT = 1
ROUND = "round.json"


@dataclass(frozen=True, kw_only=True)
class Participant:
    """One update's part in the round."""

    facility: str
    weight: float
    """Share of the mean before the rule's own choices; all weights sum to 1."""
    coefficient: float | None
    """Factor of this update in the combined step; None where the rule works value by value."""
    tokens: int = 0
    samples: int = 0
    staleness: int = 0
    """Rounds the update is late."""
    norm: float | None = None
    """L2 norm of update minus base."""
    cosine_to_mean: float | None = None
    """Cosine of this update's step to the weighted mean step of all."""
    cosines: dict[str, float] = field(default_factory=dict)
    """Cosine of this update's step to each other's, by facility."""


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """What `round.json` holds."""

    federation: str
    round: int
    """The round whose updates were combined; the new model is the input of the next."""
    rule: str
    combiner: str
    outer: str
    participants: list[Participant]
    quarantined: dict[str, str] = field(default_factory=dict)
    """Outliers that were left out of the round, with the reason."""
    suspects: dict[str, str] = field(default_factory=dict)
    """Outliers that are reported but took part."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Facilities whose updates were refused, with the reason; the mean was made without them."""
    tensors_matched: int = 0
    tensors_personal: int = 0
    """Not federated: kept from the base model."""
    tensors_copied: int = 0
    """Not floating point: equal everywhere, copied."""
    parameters: int = 0
    """Elements averaged."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Decision about dtypes, with the reason, by (input -> output)."""
    mean_norm: float | None = None
    """L2 norm of the weighted mean step."""
    step_norm: float | None = None
    """L2 norm of the change from the old to the new float32 master."""
    statistics: str = "exact"
    """Coverage of norms and cosines: every element (`exact`), one piece in sixteen (`sample`) or none (`off`)."""
    settings: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by phase."""
    bytes_read: int = 0
    bytes_written: int = 0
    threads: int = 1
    details: dict[str, Any] = field(default_factory=dict)
    """What the rule adds: selections, thresholds, errors of a factorisation."""
    format: int = FORMAT


def write_record(path: Path, record: RoundRecord) -> None:
    """Write round.json, atomically."""
    write_json(path, asdict(record))
