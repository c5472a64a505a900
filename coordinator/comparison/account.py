"""`comparison.json` in the archive: how far the comparison of models is, and what the facilities found."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any

from coordinator.archive.rounds import Archive
from facility.exchange.validation import parse_dataclass, validated

NOTE = "comparison"


@validated(frozen=True, kw_only=True)
class OwnTraining:
    """One facility's training alone."""

    rounds: int = 0
    of: int = 0
    """Rounds of the federation in which its update counted."""
    tokens: int = 0
    failed: int = 0
    """Times in a row that it failed or was absent."""
    asked: int = 0
    """Times that it asked for more time."""
    reason: str = ""
    """Reason of the last failure; empty: none."""

    @property
    def done(self) -> bool:
        return self.rounds >= self.of


@validated(frozen=True, kw_only=True)
class Account:
    """The file."""

    after_round: int
    """Number of the last round; another one makes the file void."""
    alone: dict[str, OwnTraining] = field(default_factory=dict)
    """By facility; empty: not begun."""
    alone_over: bool = False
    batch: int = 0
    """Batches of models that are done with."""
    evaluated: list[str] = field(default_factory=list)
    """Folders of their models, the global one aside; earlier versions noted the number of batches alone."""
    tries: int = 0
    """Times that the batch under way was sent."""
    over: bool = False
    chosen: str = ""
    """The candidate that is the final model in place of the global one; empty: none is."""
    gain: float | None = None
    """Nats per token by which the candidate's loss is lower than the global model's, mean over facilities; None: no
    facility evaluated both."""
    figures: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By facility, what it found (`facility.exchange.messages.comparison.Figure`)."""
    tasks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    gaps: dict[str, str] = field(default_factory=dict)
    """Facilities without figures of some models, and why."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """What each job did and used, as rows of a round."""


def read_account(archive: Archive) -> Account | None:
    """None where the comparison has not begun, or was of fewer rounds."""
    note = archive.read_note(NOTE)
    if not note:
        return None
    found = parse_dataclass(Account, note, file=archive.path / f"{NOTE}.json")
    return found if found.after_round == len(archive.rounds()) - 1 else None


def write_account(archive: Archive, account: Account) -> None:
    archive.write_note(NOTE, dataclasses.asdict(account))
