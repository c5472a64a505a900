"""What decides how far a facility's training goes, compared between facilities before they send masked updates.

A sum hides its updates among each other only while they are of one size. A coordinator that gave all facilities but one
a learning rate of nearly nothing would read that one's update off the sum; so each signs what it was told in its keys,
and none masks with a facility that was told otherwise (the attack on models instead of settings: Pasquini et al. 2022,
arXiv 2111.07380).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import median_low
from typing import Any

from facility.exchange.errors import InputError
from facility.exchange.masking.roster import Keys, Roster
from facility.exchange.messages.settings import FacilitySettings, TrainingSettings

ALIKE = (
    "optimizer",
    "optimizer_parameters",
    "learning_rate",
    "minimum_learning_rate_ratio",
    "schedule",
    "warmup_steps",
    "weight_decay",
    "beta1",
    "beta2",
    "epsilon",
    "clip_norm",
    "proximal",
    "keep_optimizer",
    "drift_correction",
    "freeze",
)
"""Fields of `training:` that are equal at all facilities of secure aggregation."""
ALIKE_LORA = ("rank", "trained_rank", "alpha", "dropout", "targets", "rslora", "dora", "parameters", "modules_to_save")
"""The same of `training.lora`."""
MOST_RATIO = 16
"""No facility trains on more than so many times the sequences of another in a round."""


def walk_settings(training: TrainingSettings) -> dict[str, Any]:
    """What of `training:` must be equal at all facilities, by key."""
    lora = {f"lora.{name}": getattr(training.lora, name) for name in ALIKE_LORA}
    return {name: getattr(training, name) for name in ALIKE} | lora


def walk_of(settings: FacilitySettings) -> str:
    """The digest of what decides how far a facility's weights can move in a step, and which: 64 hexadecimal digits."""
    told = walk_settings(settings.training) | {
        "rounds": settings.rounds,
        "include": settings.include,
        "exclude": settings.exclude,
        "differential": None if settings.differential is None else dataclasses.asdict(settings.differential),
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def sequences_of(training: TrainingSettings, steps: int = 0) -> int:
    """Sequences of a round; `steps`: what the round's model asks for, 0: `training.steps`."""
    return (steps or training.steps) * training.batch_sequences


def far_apart(amounts: Iterable[int]) -> bool:
    """Whether two of these amounts of sequences, all above 0, differ by more than `MOST_RATIO` times."""
    every = list(amounts)
    return max(every) > MOST_RATIO * min(every)


def check_walks(roster: Roster, facility: str) -> None:
    """Raise `InputError` unless all members signed the same settings of training, and claim amounts of one order."""
    own = roster.keys[facility]
    for name, other in roster.keys.items():
        if other.walk != own.walk:
            raise InputError(
                f"{name!r} was told other settings of training than {facility!r} for round {roster.agreement.round} "
                "(learning rate, optimizer, schedule, clipping, adapters or what is federated): nothing is masked, "
                "for a sum of updates of unlike size shows the largest; give all facilities the same"
            )
        if far_apart((own.samples, other.samples)):
            raise InputError(
                f"{name!r} trains on {other.samples} sequences in round {roster.agreement.round} and {facility!r} on "
                f"{own.samples}, expected at most {MOST_RATIO} times as many: nothing is masked, for a sum of updates "
                "of unlike size shows the largest"
            )


def odd_ones(keys: Mapping[str, Keys]) -> dict[str, str]:
    """Facilities with which the others would not mask, and why: without these, the rest passes `check_walks`.

    What most were told counts; where as many were told one thing as another, nobody can say who is odd, and all stay.
    Of amounts, the farthest from the median goes first.
    """
    refused: dict[str, str] = {}
    counts = Counter(one.walk for one in keys.values()).most_common(2)
    if len(counts) == 2 and counts[0][1] > counts[1][1]:
        for name, one in keys.items():
            if one.walk != counts[0][0]:
                refused[name] = f"{name!r} signed other settings of training than most facilities"
    left = {name: one.samples for name, one in keys.items() if name not in refused}
    while left and far_apart(left.values()):
        middle = median_low(left.values())
        farthest = max(left, key=lambda name: max(left[name] / middle, middle / left[name]))
        refused[farthest] = (
            f"{farthest!r} trains on {left.pop(farthest)} sequences and the median facility on {middle}, expected at "
            f"most {MOST_RATIO} times more or less between any two"
        )
    return refused


def check_own(own: Keys, settings: FacilitySettings, steps: int = 0) -> None:
    """Raise `InputError` where this job is told otherwise than this facility's signed keys say.

    `steps`: as in `sequences_of`.
    """
    if own.walk != walk_of(settings):
        raise InputError(
            f"the settings of training differ from those for which {own.facility!r} signed its keys of round "
            f"{own.round}: nothing is masked; the next round draws keys anew"
        )
    sequences = sequences_of(settings.training, steps)
    if far_apart((sequences, own.samples)):
        raise InputError(
            f"this round asks {own.facility!r} for {sequences} sequences and its signed keys claim {own.samples}, "
            f"expected at most {MOST_RATIO} times more or less: nothing is masked"
        )


def unlike(training: Mapping[str, TrainingSettings]) -> tuple[str, str, str] | None:
    """The first key that differs between two facilities, and these two; None where all agree."""
    names = sorted(training)
    first = walk_settings(training[names[0]])
    for name in names[1:]:
        for key, value in walk_settings(training[name]).items():
            if value != first[key]:
                return key, names[0], name
    return None
