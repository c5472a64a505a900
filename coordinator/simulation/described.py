"""What a simulated federation is: its facilities, queues, links and policy; the file of `--federation`."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from coordinator.config.closing import MOST_LATE
from coordinator.problem.printable import read_printable
from facility.exchange.errors import ConfigurationError
from facility.exchange.validation import NonNegative, check_format, parse_dataclass, validated

Array = NDArray[np.float64]
FORMAT = 1
LEAST, MOST = 1e-12, 1e12
"""Of any number but 0: sums and shares of others are infinite, or lose the seconds of a round."""


def _in_range(one: Any) -> None:
    """Raise `ConfigurationError` for a number that cannot be computed with."""
    for name, value in vars(one).items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and number and not LEAST <= abs(number) <= MOST:
                raise ConfigurationError(f"{name} is {number:g}, expected {LEAST:g} to {MOST:g}, or 0")


def _check(one: object, expected: str, **allowed: bool) -> None:
    """Raise `ConfigurationError` for the first field of `one` that is not `allowed`."""
    for name, good in allowed.items():
        if not good:
            raise ConfigurationError(f"{name} is {getattr(one, name)!r}, expected {expected}")


@validated(frozen=True, kw_only=True)
class Queue:
    """How long a job waits for its start."""

    kind: Literal["none", "fixed", "exponential", "lognormal", "chance", "seen"] = "none"
    """`chance`: `seconds` with `probability`, drawn `draws` times; else none. `seen`: one of `waits`, each as likely as
    the others."""
    seconds: float = 0.0
    """Fixed, mean of the exponential, median of the lognormal, or length of a chance's delay."""
    spread: float = 1.0
    """Lognormal: standard deviation of the logarithm."""
    probability: float = 0.0
    draws: int = 1
    waits: list[float] = field(default_factory=list)
    """Seconds that jobs were seen to wait."""

    def __post_init__(self) -> None:
        _in_range(self)
        if (self.kind == "seen") != bool(self.waits):
            raise ConfigurationError(
                f"waits is {self.waits} with kind {self.kind!r}, expected waits with kind 'seen', and with no other"
            )
        _check(self, "numbers of 0 or more", waits=min(self.waits, default=0.0) >= 0)
        _check(self, "0 or more", seconds=self.seconds >= 0, spread=self.spread >= 0)
        _check(self, "0 to 1", probability=0 <= self.probability <= 1)
        _check(self, "1 or more", draws=self.draws >= 1)

    def draw(self, random: np.random.Generator, count: int) -> Array:
        if self.kind == "exponential":
            return random.exponential(self.seconds, count)
        if self.kind == "lognormal":
            return self.seconds * np.exp(random.normal(0.0, self.spread, count))
        if self.kind == "chance":
            return self.seconds * random.binomial(self.draws, self.probability, count).astype(float)
        if self.kind == "seen":
            return random.choice(np.array(self.waits), count)
        return np.full(count, self.seconds if self.kind == "fixed" else 0.0)


@validated(frozen=True, kw_only=True)
class Site:
    """One facility, or `count` alike."""

    name: str = "facility"
    count: int = 1
    train_seconds: float
    """One round's local work."""
    train_spread: float = 0.0
    """Uniform, this fraction of the seconds up and down."""
    samples: float = 1.0
    """Of one round's work, in any unit that all facilities share (sequences, tokens)."""
    round_steps: int = 0
    """Steps of one round's work, of which a job takes a whole number; 0: work can be divided at will."""
    queue: Queue = field(default_factory=Queue)
    download_megabytes_per_second: float = 0.0
    """Of this facility's own link; 0: not limited."""
    upload_megabytes_per_second: float = 0.0
    failure_probability: float = 0.0
    """Of a job; it fails at a uniform moment of its training."""
    attempts: int = 3
    """Jobs in a round before the facility skips the round."""

    def __post_init__(self) -> None:
        _in_range(self)
        _check(self, "more than 0", train_seconds=self.train_seconds > 0, samples=self.samples > 0)
        _check(self, "0 or more, below 1", train_spread=0 <= self.train_spread < 1)
        _check(self, "0 or more, below 1", failure_probability=0 <= self.failure_probability < 1)
        _check(self, "0 or more", round_steps=self.round_steps >= 0)
        _check(self, "1 or more", count=self.count >= 1, attempts=self.attempts >= 1)
        _check(
            self,
            "0 (not limited) or more",
            download_megabytes_per_second=self.download_megabytes_per_second >= 0,
            upload_megabytes_per_second=self.upload_megabytes_per_second >= 0,
        )


@validated(frozen=True, kw_only=True)
class Scenario:
    """What to simulate; the file of `--federation`."""

    rounds: int
    facilities: list[Site]
    model_megabytes: float = 0.0
    """What travels to a facility."""
    update_megabytes: float = -1.0
    """What comes back; -1: as much as the model."""
    coordinator_megabytes_per_second: float = 0.0
    """The coordinator's link, each direction; 0: not limited."""
    aggregate_seconds: float = 0.0
    """Between the last update of a round and the next model."""
    aggregate_seconds_per_update: float = 0.0
    fan_in: int = 0
    """Updates or partial sums that one coordinator takes, where several average in a tree; 0: one takes all."""
    partial_megabytes: float = -1.0
    """What one coordinator of a tree hands to the next; -1: four times an update (8 bytes for each value of 2)."""
    policy: Literal["synchronous", "quorum", "deadline", "asynchronous"] = "synchronous"
    quorum: int = 0
    """Updates that close a round under `quorum`."""
    late: Literal["carry", "drop"] = "carry"
    """Under `quorum`, an update that is not there when the round closes counts in the round in which it arrives, or is
    discarded: its facility then begins from the newest model when its job has ended, and the last round waits for all,
    as `rounds: {late: drop}` does."""
    keep_rounds: NonNegative[int] = 3
    """Under `quorum`, models of the latest rounds that the coordinator keeps, as in federation.yml: a late update
    counts while the one that it started from is among them, so a round waits for what the next could not use."""
    deadline_seconds: float = 0.0
    steps: Literal["fixed", "elastic"] = "fixed"
    """`elastic`: a job works until the expected end of its round, from `least_steps` to `most_steps` times its round's
    work, by what its facility's latest jobs needed beside training, as `rounds: {steps: elastic}` does; the first
    round's jobs, of which nothing is known, do one round's work."""
    least_steps: float = 0.25
    most_steps: float = 4.0
    seed: NonNegative[int] = 0
    format: int = FORMAT

    def __post_init__(self) -> None:
        _in_range(self)
        _check(self, "1 or more", rounds=self.rounds >= 1)
        _check(self, "one facility or more", facilities=bool(self.facilities))
        if self.policy == "quorum" and not 1 <= self.quorum <= self.size:
            raise ConfigurationError(f"quorum is {self.quorum}, expected 1 to {self.size} (the facilities)")
        if self.late == "drop" and self.policy != "quorum":
            raise ConfigurationError(f"late is 'drop' with policy {self.policy!r}, expected 'quorum'")
        if self.steps == "elastic" and self.policy == "asynchronous":
            raise ConfigurationError(
                "steps is 'elastic' with policy 'asynchronous', in which no round ends; expected another policy"
            )
        _check(self, "more than 0, 1 at most", least_steps=0 < self.least_steps <= 1)
        _check(self, "1 or more", most_steps=self.most_steps >= 1)
        if self.policy == "deadline":
            _check(self, "more than 0", deadline_seconds=self.deadline_seconds > 0)
        if self.fan_in and (self.fan_in < 2 or self.policy != "synchronous"):
            raise ConfigurationError(
                f"fan_in is {self.fan_in} with policy {self.policy!r}, expected 2 or more with 'synchronous', or 0"
            )
        _check(
            self,
            "0 or more",
            model_megabytes=self.model_megabytes >= 0,
            coordinator_megabytes_per_second=self.coordinator_megabytes_per_second >= 0,
            aggregate_seconds=self.aggregate_seconds >= 0,
            aggregate_seconds_per_update=self.aggregate_seconds_per_update >= 0,
        )
        for name in ("update_megabytes", "partial_megabytes"):
            _check(self, "0 or more, or -1", **{name: (value := getattr(self, name)) >= 0 or value == -1})

    @property
    def size(self) -> int:
        return sum(site.count for site in self.facilities)

    @property
    def most_late(self) -> int:
        """Rounds that a carried update may be late."""
        return (self.keep_rounds or MOST_LATE + 1) - 1


def read_scenario(path: Path) -> Scenario:
    """Read the file of `--federation`. Raises `ConfigurationError`."""
    raw = read_printable(path)
    check_format(raw, FORMAT, file=path)
    return parse_dataclass(Scenario, raw, file=path)
