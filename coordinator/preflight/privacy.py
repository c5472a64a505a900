"""What a facility's privacy budget will buy, before a job is submitted: noise, expected sample, noise in its losses."""

from __future__ import annotations

import math

from coordinator.config.federation import Facility, Federation
from coordinator.preflight.probe_answer import DatasetAnswer
from coordinator.preflight.row import Row, fail, ok, warning
from facility.exchange.errors import InputError
from facility.exchange.messages.privacy import DifferentialSettings, sampling_rate
from facility.exchange.privacy.accounting import least_noise

NOISY = 0.1
"""Nats of noise in a validation loss from which on a curve cannot be read."""
WEAK = 10.0
"""An epsilon above which little is promised."""
CHECK = "privacy"


def check_secure_aggregation(federation: Federation) -> list[Row]:
    """A row on what the coordinator will learn of updates; none without masks."""
    if (privacy := federation.masks) is None:
        return []
    count = len(federation.facilities)
    least, threshold = privacy.least_sum_of(count), privacy.threshold_of(count)
    found = (
        f"the coordinator learns sums of {least} or more of {count} updates, unmasked by {threshold} answers; a round "
        f"may lose {count - least} updates, and then {count - threshold} answers"
    )
    if any(one.training.optimizer_state == "shared" for one in federation.facilities):
        found += "; second moments are shared, of which it learns the same sums"
    if privacy.differential is None:
        return [ok("federation", CHECK, found)]
    return [ok("federation", CHECK, f"{found}; updates are noised at their facility before they are masked")]


def check_differential_privacy(federation: Federation, facility: Facility, answer: DatasetAnswer) -> list[Row]:
    """Rows on the budget of one facility; `answer`: what its probe says of the dataset."""
    settings = federation.privacy.differential if federation.privacy is not None else None
    if settings is None or answer.error:
        return []
    if answer.image_size is not None:
        found = "images are not trained with differential privacy"
        return [fail(facility.name, CHECK, found, "remove privacy.differential")]
    if refused := answer.refused_units.get(settings.unit):
        return [fail(facility.name, CHECK, refused, "do so, or remove privacy.differential")]
    counts = answer.documents if settings.unit == "document" else answer.blocks
    if not counts:
        return [
            fail(
                facility.name,
                CHECK,
                "its dataset joins documents, so a document's gradient cannot be distinguished from its neighbours'",
                "prepare it with --documents separate, or set privacy.differential.unit to block",
            )
        ]
    if settings.unit == "document" and answer.hides_rests:
        return [
            fail(
                facility.name,
                CHECK,
                "its dataset was prepared by a version that did not mark where a document goes on in the next block",
                "prepare it again with --replace",
            )
        ]
    train, validation = counts["train"], counts["validation"]
    batch, name = facility.training.batch_sequences, facility.name
    if answer.blocks["train"] < batch or not validation:
        return []  # the dataset's own rows say so
    try:
        sampling_rate(batch, train, settings)
    except InputError as error:
        return [fail(name, CHECK, str(error), "correct that, or prepare a dataset of more text there")]
    try:
        return [_bought(federation, facility, settings, train, validation, answer)]
    except InputError as error:
        return [fail(name, CHECK, str(error), "run coordinator/setup.sh again")]


def _bought(
    federation: Federation,
    facility: Facility,
    settings: DifferentialSettings,
    train: int,
    validation: int,
    answer: DatasetAnswer,
) -> Row:
    training, epsilon, delta = facility.training, settings.epsilon, settings.delta
    steps = federation.rounds * training.steps
    noise = least_noise(count=steps, sampling_rate=training.batch_sequences / train, epsilon=epsilon, delta=delta)
    figures = least_noise(count=2 * federation.rounds + 1, sampling_rate=1.0, epsilon=epsilon, delta=delta)
    if noise is None or figures is None:
        return fail(
            facility.name,
            CHECK,
            f"no noise is enough for epsilon {settings.epsilon:g} at delta {settings.delta:g} over {steps:,} steps",
            "allow a larger epsilon, or take fewer steps",
        )
    bound = math.log(max(2, answer.classes or answer.vocabulary_size))
    evaluated = min(validation, training.evaluation_sequences or validation)
    deviation = figures * bound / evaluated
    found = (
        f"epsilon {settings.epsilon:g} at delta {settings.delta:g} for each {settings.unit} after {steps:,} steps: "
        f"noise multiplier {noise:.3g}, about {training.batch_sequences} of {train:,} {settings.unit}s a step; losses "
        f"get noise of {deviation:.2g} nats"
    )
    if deviation > NOISY:
        advice = f"hold out more {settings.unit}s (there are {evaluated:,}), or take fewer rounds"
        return warning(facility.name, CHECK, found, advice)
    if settings.epsilon > WEAK:
        return warning(facility.name, CHECK, found, "an epsilon above 10 promises little: lower it")
    return ok(facility.name, CHECK, found)
