"""`coordinator.json`: what the coordinator's steps need to know of the federation, rendered from federation.yml."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from coordinator.config.aggregation import AggregationSettings
from coordinator.config.buffering import GroupSettings
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.settings import SPARSE_DENSITY, Encoding, read_settings

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class StopSettings:
    """When a federation ends before its last round."""

    target_perplexity: float = 0.0
    """Stop once the global model's perplexity (geometric mean over facilities) is at or below this; 0 is off."""
    patience: int = 0
    """Stop after so many rounds without a better global perplexity; 0 is off."""
    divergence: float = 4.0
    """Stop, with an error, when the global loss exceeds the best so far by this much (nats per token) or is not finite; 0 is off."""

    def __post_init__(self) -> None:
        for name in ("target_perplexity", "patience", "divergence"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"stop.{name} is {getattr(self, name)}, expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class SendingSettings:
    """How a round's model travels to the facilities; how their updates come back is `training.encoding`."""

    encoding: Encoding = "full"
    """Whole, or as the difference to the model of the round before (51, 27 or 25 % of bfloat16); whole to a facility
    that does not hold that one."""
    sparse_density: float = SPARSE_DENSITY
    """Share of the values that `sparse` sends each round, in 1 + 4 x this many bits a value; the rest is sent rounds later. The
    default harms nothing measurable in 10 rounds, 0.35 nothing in 30."""

    def __post_init__(self) -> None:
        if not 0 < self.sparse_density <= 1:
            raise ConfigurationError(f"sparse_density is {self.sparse_density}, expected more than 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class ClaimSettings:
    """An update counts by the tokens that its report claims; what happens to a claim that its settings do not allow."""

    action: Literal["refuse", "cap", "off"] = "refuse"
    """`refuse` the update by name, or `cap` the claim to steps x batch x the longest sequence and say so in round.json."""
    sequence_tokens: int = 0
    """Longest sequence of any facility's dataset; 0: the positions that the model has."""

    def __post_init__(self) -> None:
        if self.sequence_tokens < 0:
            raise ConfigurationError(f"sequence_tokens is {self.sequence_tokens}, expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class CoordinatorSettings:
    """The rendered file, read by start, receive, aggregate and report."""

    federation: str
    rounds: int
    facilities: list[str]
    """Names, in the order of federation.yml."""
    minimum_facilities: int = 1
    """Fewer verified updates than this end the run with an error; the archive stays as it was. With groups: fewer
    facilities that have not failed for good."""
    retries: int = 0
    """Times a round is asked for again because a facility failed; facilities that are done answer at once. With groups:
    times one facility's round is; then the others go on without it."""
    come_backs: int = 50
    """Times a round is asked for again because a facility ran out of time and saved its state mid-round."""
    keep_rounds: int = 3
    """Complete rounds (groups) whose weights stay in the archive (reports stay for ever); 0 keeps all."""
    final_evaluation: bool = True
    """After the last round, send the final model once more, for evaluation only."""
    aggregation: AggregationSettings = field(default_factory=AggregationSettings)
    sending: SendingSettings = field(default_factory=SendingSettings)
    claims: ClaimSettings = field(default_factory=ClaimSettings)
    sequences: dict[str, int] = field(default_factory=dict)
    """By facility, the sequences that it trains on in a round: steps x batch."""
    stop: StopSettings = field(default_factory=StopSettings)
    groups: GroupSettings | None = None
    """None: rounds; the rendered file then has no such key."""
    format: int = FORMAT


def read_coordinator_settings(path: Path) -> CoordinatorSettings:
    """Raises `ConfigurationError`."""
    return read_settings(CoordinatorSettings, path, newest=FORMAT, advice="render again with this version")
