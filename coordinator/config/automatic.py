"""What `rule: auto` and `optimizer_state: auto` choose: the best of what was measured in the most similar federation.

`automatic.json` holds one row for each federation of `tests/bench/federated_quality.py`, written by
`tests/bench/federated_quality_choose.py` from that benchmark's results: the server optimizer with the lowest perplexity
among those whose second moments are shared, and among those whose second moments are personal. No row's choice is worse
than the plain mean there. Rows of other inner optimizers and of adapters are few: of those with the same the nearest
counts, and those of AdamW over whole models where there are none.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from facility.exchange.json_values import values_in

TABLE = Path(__file__).with_name("automatic.json")
DIGITS = 9
"""After the point, of a distance: two that are equal but for the last bits of logarithms and sums are equal. Which of
them is the smaller one differs between versions of Python."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What is known of a federation before its first round."""

    facilities: int
    rounds: int
    steps: int
    """Local steps a round: the facilities' geometric mean, rounded."""
    pretrained: bool
    """The model of round 0 was trained before."""
    parameters: int | None = None
    """Of the model; None: not known."""
    optimizer: str = "adamw"
    """The facilities' inner optimizer."""
    adapters: bool = False
    """Adapters are trained, not the whole model."""

    def distance(self, other: Situation) -> float:
        """How unlike another federation is: factors of two in facilities, rounds and steps, a quarter of those in
        parameters where both are known; 8 for the model's start."""
        pairs = ((self.facilities, other.facilities), (self.rounds, other.rounds), (self.steps, other.steps))
        size = abs(math.log2(self.parameters / other.parameters)) if self.parameters and other.parameters else 0.0
        factors = [abs(math.log2(a / b)) for a, b in pairs]
        return round(math.fsum([*factors, size / 4, 8 * (self.pretrained != other.pretrained)]), DIGITS)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One way to aggregate and what it reached."""

    aggregation: dict[str, Any]
    """Keys of `aggregation:`."""
    over_pooled: float
    """Perplexity over pooled training's at equal tokens and learning rate, geometric mean."""
    seeds: int
    """Runs: seeds, and other languages."""
    training: dict[str, Any] = field(default_factory=dict)
    """Keys of `training:` with which it was measured, where they are not the defaults."""


@dataclass(frozen=True, kw_only=True)
class MeasuredFederation:
    """One row of the table."""

    situation: Situation
    mean: float
    """What the plain mean reached, over pooled."""
    best: dict[str, Measured]
    """By `optimizer_state`: the best of those measured."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What `auto` means in one federation."""

    aggregation: dict[str, Any]
    """Keys of `aggregation:`."""
    optimizer_state: str
    reason: str
    training: dict[str, Any] = field(default_factory=dict)
    """Keys of `training:` that go with it."""
    row: Situation | None = field(default=None, repr=False)


@functools.cache
def read_table(file: Path = TABLE) -> tuple[MeasuredFederation, ...]:
    """The measured federations."""
    rows = []
    for row in values_in(file)["rows"]:
        best = {state: Measured(**found) for state, found in row["best"].items()}
        rows.append(MeasuredFederation(situation=Situation(**row["situation"]), mean=row["mean"], best=best))
    return tuple(rows)


def choose_aggregation(
    situation: Situation, *, may_share: bool, table: tuple[MeasuredFederation, ...] | None = None
) -> Choice:
    """The best aggregation measured in the federation most like `situation`, and why.

    `may_share`: second moments can be shared here. With a single facility there is nothing to average: the plain mean.
    """
    if situation.facilities < 2:
        return Choice(aggregation={"rule": "mean"}, optimizer_state="personal", reason="a single facility: plain mean")
    rows = read_table() if table is None else table
    row = min(rows, key=lambda one: _order(one.situation, situation))
    allowed = {state: one for state, one in row.best.items() if may_share or state == "personal"}
    state, best = min(allowed.items(), key=lambda pair: pair[1].over_pooled)
    near = row.situation
    like = f"{near.facilities} facilities, {near.rounds} rounds of {near.steps} steps, a model " + (
        "trained before" if near.pretrained else "with random weights"
    )
    like += f" of {near.parameters / 1e6:.2g} million parameters" if near.parameters else ""
    like += ", adapters" if near.adapters else ""
    like += f", {near.optimizer}" if near.optimizer != "adamw" or situation.optimizer != "adamw" else ""
    reason = (
        f"{_described(best.aggregation | best.training)}{_describe_state(state, row)}: best of those measured in the "
        f"most similar federation ({like}), {best.over_pooled:.2f} of pooled training's perplexity (plain mean "
        f"{row.mean:.2f}, {best.seeds} run{'s' if best.seeds > 1 else ''})"
    )
    return Choice(
        aggregation=dict(best.aggregation),
        optimizer_state=state,
        reason=reason,
        training=dict(best.training),
        row=near,
    )


def _order(row: Situation, asked: Situation) -> tuple[bool, bool, float, int, int]:
    """The row that counts comes first: of those that train the same, with the same optimizer, the most similar; of
    such the one with most rounds, then the largest model."""
    unlike = row.adapters != asked.adapters, row.optimizer != asked.optimizer
    return *unlike, row.distance(asked), -row.rounds, -(row.parameters or 0)


def _describe_state(state: str, row: MeasuredFederation) -> str:
    """Whose the second moments are, where both were measured."""
    return f", {state} second moments" if len(row.best) > 1 else ""


def _described(settings: dict[str, Any]) -> str:
    own = settings.get("optimizer_parameters", {})
    flat = {name: value for name, value in settings.items() if name not in ("rule", "optimizer_parameters")}
    flat |= {f"optimizer_parameters.{name}": value for name, value in own.items()}
    numbers = ", ".join(f"{name} {value:g}" for name, value in flat.items())
    return f"{settings['rule']} ({numbers})" if numbers else str(settings["rule"])
