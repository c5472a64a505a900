"""`report.json` and `failure.json`: what a facility tells of its round."""

from __future__ import annotations

import json
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, Literal

from facility.exchange.errors import ManifestError
from facility.exchange.files.durable import write_json
from facility.exchange.validation import parse, validated

FORMAT = 1
REPORT = "report.json"
FAILURE = "failure.json"


@validated(frozen=True, kw_only=True)
class Seconds:
    """Wall time of the parts of a round."""

    load: float = 0.0
    train: float = 0.0
    evaluate: float = 0.0
    save: float = 0.0


@validated(frozen=True, kw_only=True)
class Report:
    """One facility's account of one round."""

    federation: str
    facility: str
    round: int
    samples: int
    """Sequences trained on in this round."""
    tokens: int
    """Tokens trained on in this round: the default weight of the update in the mean."""
    steps: int
    """Optimizer steps taken."""
    loss_received: float
    """Mean validation loss (nats per predicted token) of the model as received."""
    loss_returned: float
    """The same of the model as returned (after rounding to the export dtype where possible)."""
    perplexity_received: float
    perplexity_returned: float
    training_loss: float
    """Mean training loss over the round's steps."""
    seconds: Seconds = field(default_factory=Seconds)
    tokens_per_second: float = 0.0
    peak_memory_bytes: int = 0
    """Largest over the ranks."""
    seed: int = 0
    position: int = 0
    """Sequences of the dataset consumed since round 0: the next round goes on from here."""
    ranks: int = 1
    devices: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    """Further figures by name (time split, MFU, groups, ...); a reader may ignore them."""
    format: int = FORMAT


@validated(frozen=True, kw_only=True)
class Failure:
    """Left in place of an update when a facility could not finish its round."""

    facility: str
    round: int
    reason: str
    """One sentence for the user."""
    log_tail: str = ""
    """Last lines of the failing rank's output."""
    kind: Literal["failed", "refused", "absent"] = "failed"
    """Who says so: the facility itself, the coordinator's check, or nobody (nothing came back)."""
    again: bool = False
    """True when time ran out and the same command goes on mid-round."""
    format: int = FORMAT


def write(directory: Path, message: Report | Failure) -> None:
    write_json(Path(directory) / (REPORT if isinstance(message, Report) else FAILURE), asdict(message))


def read_report(directory: Path) -> Report:
    return _read(Path(directory) / REPORT, Report)


def read_failure(directory: Path) -> Failure | None:
    """The failure that an update directory tells of, or None."""
    path = Path(directory) / FAILURE
    return _read(path, Failure) if path.exists() else None


def _read(path: Path, kind: type) -> Any:
    try:
        return parse(kind, json.loads(path.read_text()), file=path)
    except FileNotFoundError:
        raise ManifestError(f"{path} is missing: the update is incomplete") from None
    except (OSError, ValueError) as error:
        raise ManifestError(f"{path} is malformed: {error}") from None
