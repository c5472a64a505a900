"""What decides how far a facility's training goes, compared between facilities before they send masked updates.

A sum hides its updates among each other only while they are of one size. A coordinator that gave all facilities but one
a learning rate of nearly nothing would read that one's update off the sum; so each signs what it was asked for in its
keys, and none masks with a facility that was asked otherwise (the attack on models instead of settings: Pasquini et al.
2022, arXiv 2111.07380).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
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
    "optimizer_state",
    "optimizer_state_form",
    "optimizer_state_every",
    "first_moments",
    "drift_correction",
    "freeze",
    "export_dtype",
    "encoding",
    "sparse_density",
    "unsent_share",
)
"""Fields of `training:` that are equal at all facilities of secure aggregation."""
ALIKE_LORA = (
    "rank",
    "trained_rank",
    "freeze_a",
    "alpha",
    "dropout",
    "targets",
    "rslora",
    "dora",
    "parameters",
    "modules_to_save",
    "base_sha256",
)
"""Fields of `training.lora` that are equal at all facilities of secure aggregation."""
ALIKE_SYNC = (
    "policy",
    "parameters",
    "every",
    "outer_learning_rate",
    "outer_momentum",
    "weights",
    "optimizer_state",
    "step",
    "progress",
)
"""Fields of `training.sync` that are equal at all facilities of secure aggregation."""
ALIKE_PREFERENCE = ("beta", "label_smoothing")
"""Fields of `training.preference` that are equal at all facilities of secure aggregation."""
MOST_RATIO = 16
"""No facility trains on more than so many times the sequences of another in a round."""
MOST_STEPS_RATIO = 4
"""Nor takes more than so many times its steps: an update grows with them, whatever the batch."""


def walk_settings(training: TrainingSettings) -> dict[str, Any]:
    """What of `training:` must be equal at all facilities, by key."""
    parts = {"lora": ALIKE_LORA, "sync": ALIKE_SYNC, "preference": ALIKE_PREFERENCE}
    inner = {f"{part}.{name}": getattr(getattr(training, part), name) for part in parts for name in parts[part]}
    return {name: getattr(training, name) for name in ALIKE} | inner


def walk_of(settings: FacilitySettings) -> str:
    """The digest of what decides how far a facility's weights can move in a step, and which: 64 hexadecimal digits."""
    decisive = walk_settings(settings.training) | {
        "rounds": settings.rounds,
        "include": settings.include,
        "exclude": settings.exclude,
        "differential": None if settings.differential is None else dataclasses.asdict(settings.differential),
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def decisive_digest(settings: FacilitySettings, dataset: Path) -> str:
    """The digest of what, beside the walk, decides which update is made of a model: data and their order, the program
    and its precision. Two sums over the same facilities of which one had trained otherwise give that difference away.

    It says where the data lie and nothing of them.
    """
    training = settings.training
    decisive = {
        "seed": settings.seed,
        "dataset": str(dataset),
        "trainer": dataclasses.asdict(settings.trainer),
        "compute_dtype": training.compute_dtype,
        "images": dataclasses.asdict(training.images),
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def sequences_of(training: TrainingSettings) -> int:
    """Sequences of a round."""
    return training.steps * training.batch_sequences


def far_apart(amounts: Iterable[int], most: int = MOST_RATIO) -> bool:
    """Whether two of these amounts, all above 0, differ by more than `most` times."""
    every = list(amounts)
    return max(every) > most * min(every)


def check_walks(roster: Roster, facility: str) -> None:
    """Raise `InputError` unless all members signed the same settings of training, and claim amounts of one order."""
    own = roster.keys[facility]
    for name, other in roster.keys.items():
        if other.walk != own.walk:
            raise InputError(
                f"{name!r} was sent other training settings than {facility!r} for round {roster.agreement.round} "
                "(learning rate, optimizer, schedule, clipping, adapters or what is federated): nothing is masked, "
                "for a sum of updates of unlike size shows the largest; give all facilities the same"
            )
        for field, verb, what, most in AMOUNTS:
            if far_apart((mine := getattr(own, field), theirs := getattr(other, field)), most):
                raise InputError(
                    f"{name!r} {verb} {theirs} {what} in round {roster.agreement.round} and {facility!r} {mine}, "
                    f"expected at most {most} times as many: nothing is masked, for a sum of updates of unlike size "
                    "shows the largest"
                )


AMOUNTS = (
    ("samples", "trains on", "sequences", MOST_RATIO),
    ("steps", "takes", "steps", MOST_STEPS_RATIO),
)
"""Fields of keys that may differ between facilities, and by how many times at most."""


def odd_ones(keys: Mapping[str, Keys]) -> dict[str, str]:
    """Facilities with which the others would not mask, and why: without these, the rest passes `check_walks`.

    What most were asked counts; where as many were asked one thing as another, nobody can say who is odd, and all stay.
    Of amounts, the farthest from the median goes first.
    """
    refused: dict[str, str] = {}
    counts = Counter(one.walk for one in keys.values()).most_common(2)
    if len(counts) == 2 and counts[0][1] > counts[1][1]:
        for name, one in keys.items():
            if one.walk != counts[0][0]:
                refused[name] = f"{name!r} signed other settings of training than most facilities"
    for field, verb, what, most in AMOUNTS:
        left = {name: getattr(one, field) for name, one in keys.items() if name not in refused}
        while left and far_apart(left.values(), most):
            middle = median_low(left.values())
            farthest = max(left, key=lambda name: max(left[name] / middle, middle / left[name]))
            refused[farthest] = (
                f"{farthest!r} {verb} {left.pop(farthest)} {what} and the median facility {middle}, expected at most "
                f"{most} times more or less between any two"
            )
    return refused


def check_own(own: Keys, settings: FacilitySettings, dataset: Path, steps: int = 0) -> None:
    """Raise `InputError` where this job is asked otherwise than this facility's signed keys say.

    `steps`: what the round's model asks for, 0: `training.steps`.
    """
    if own.walk != walk_of(settings) or own.told not in ("", decisive_digest(settings, dataset)):
        raise InputError(
            f"the settings of training, or the dataset, differ from those for which {own.facility!r} signed its keys "
            f"of round {own.round}: nothing is masked; the next round draws keys anew"
        )
    asked = steps or settings.training.steps
    sequences = asked * settings.training.batch_sequences
    if (asked, sequences) != (own.steps, own.samples):
        raise InputError(
            f"this round asks {own.facility!r} for {asked} steps and {sequences} sequences, and its signed keys say "
            f"{own.steps} and {own.samples}, by which the others mask: nothing is masked; the next round draws keys "
            "anew"
        )


def first_difference(training: Mapping[str, TrainingSettings]) -> tuple[str, str, str] | None:
    """The first key that differs between two facilities, and these two; None where all agree."""
    names = sorted(training)
    first = walk_settings(training[names[0]])
    for name in names[1:]:
        for key, value in walk_settings(training[name]).items():
            if value != first[key]:
                return key, names[0], name
    return None
