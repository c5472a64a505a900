"""One aggregation from request to record: the object that the stages open, screen, plan, write and describe fill."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.aggregation.request import Request
from coordinator.aggregation.rules.contract import Plan
from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.sources import Sources
from coordinator.aggregation.unchanged import Linked
from coordinator.aggregation.updates import Update
from coordinator.aggregation.work import Passed
from facility.exchange.checkpoints.checkpoint import Checkpoint, TensorEntry
from facility.exchange.checkpoints.floats import Array
from facility.exchange.errors import InputError, UpdateRefused
from facility.exchange.messages.manifest import Manifest
from facility.exchange.text import number_of


@dataclass(kw_only=True)
class Aggregation:
    """What is known of a round so far. Fields are in the order in which the stages fill them."""

    request: Request
    settings: AggregationSettings
    started: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by stage."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Facilities whose updates were refused, with the reason."""

    # open
    whole: Checkpoint = field(init=False)
    """The model that was sent."""
    source: Checkpoint = field(init=False)
    """The part of `whole` that updates hold."""
    sent: Manifest | None = None
    """The manifest of the model that was sent."""
    with_adapters: bool = False
    floats: dict[str, TensorEntry] = field(default_factory=dict)
    """The federated floating-point tensors."""
    opened: list[Update] = field(default_factory=list)

    # screen
    weights: list[float] = field(default_factory=list)
    """Share of each opened update; they sum to 1."""
    capped: dict[str, float] = field(default_factory=dict)
    """The share of each facility before it was capped."""
    stated: Array | None = None
    """Squared norms of the steps as the facilities state them, where the pass that writes is to confirm them."""
    measured: Passed | None = None
    """What a first pass found, where one was needed."""
    verified: set[str] = field(default_factory=set)
    """Facilities whose updates a pass has compared with their manifests."""
    histograms: list[Array] | None = None
    suspects: dict[str, str] = field(default_factory=dict)
    """Outliers, with the reason."""
    quarantined: dict[str, str] = field(default_factory=dict)
    """Outliers that are left out of the round."""

    # plan and write
    refuted: Passed | None = None
    """What a pass measured whose plan, from stated norms, was not confirmed: it takes the place of a first pass."""
    plan: Plan = field(init=False)
    passed: Passed = field(init=False)
    """What the pass that wrote the model found."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Of the next model, by tensor."""
    sources: Sources = field(default_factory=Sources)
    """What the writing pass verifies as it reads it."""
    linked: dict[str, Linked] = field(default_factory=dict)
    """Files of the next model that are those of the last one, by name."""
    factor_errors: dict[str, Any] = field(default_factory=dict)
    """What round.json says of the mean of adapters, where there are any."""
    walk: dict[str, Any] = field(default_factory=dict)
    """What round.json says of the mean walk, where drift is corrected."""
    moments: dict[str, Any] = field(default_factory=dict)
    """What round.json says of shared second moments, where a facility's were out of line."""
    written: dict[Path, dict[str, str]] = field(default_factory=dict)
    """sha256 of the files of tensors, by the directory of the model and of the state."""

    @property
    def work(self) -> list[float] | None:
        """Amount of work behind each update, where facilities did unlike amounts; None: all count alike."""
        work = self.request.work
        return None if work is None else [work.get(name, 1.0) for name in self.names]

    @property
    def names(self) -> list[str]:
        """Facilities of the opened updates, in their order."""
        return [update.facility for update in self.opened]

    @property
    def number(self) -> int:
        """Number of the round, from 0."""
        return self.sent.round if self.sent else 0

    def clock(self, stage: str) -> None:
        """Note what has passed since the last note."""
        self.seconds[stage] = time.perf_counter() - self.started - sum(self.seconds.values())

    def drop(self, refusal: UpdateRefused) -> None:
        """Go on without a refused update. Raises the refusal where that is not asked for."""
        if not self.request.drop_refused:
            raise refusal
        self.dropped[refusal.facility] = refusal.reason
        self.opened = [update for update in self.opened if update.facility != refusal.facility]

    def check_enough(self, updates: Sequence[Update]) -> None:
        """Raise `InputError` when too few updates are left."""
        left, least = len(updates), max(1, self.request.minimum_updates)
        if self.dropped and left < least:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(self.dropped.items()))
            verb = "is" if left == 1 else "are"
            raise InputError(f"{number_of(left, 'update')} {verb} left, expected at least {least} ({reasons})")
