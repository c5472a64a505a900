"""Puts measured values in the place of `auto`: in the aggregation, and in each facility's optimizer state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from coordinator.aggregation.settings import AUTO, AggregationSettings
from coordinator.config.automatic import Choice, Situation, choose_aggregation
from facility.exchange.checkpoints.checkpoint import Checkpoint, Opened, TensorEntry, open_checkpoint
from facility.exchange.checkpoints.floats import STORAGE, widen
from facility.exchange.errors import CrossFedError
from facility.exchange.messages.optimizers import OPTIMIZERS
from facility.exchange.messages.settings import TrainingSettings

OUTER = ("rule", "server_learning_rate", "momentum", "momentum_warmup", "momentum_friction")
"""Keys of `aggregation:` that `auto` chooses, unless they are given."""


def resolve_aggregation(
    given: Mapping[str, Any], settings: AggregationSettings, choice: Choice, *, carried: bool
) -> AggregationSettings:
    """The settings with `auto` replaced. `given`: the section as written; values given there are kept.

    `carried`: late updates are averaged in later rounds.
    """
    found = _resolved_rule(given, settings, choice)
    if found.incomplete_rate != AUTO:
        return found
    pays = settings.rule == AUTO and found.server_optimizer == "nesterov" and not carried
    return dataclasses.replace(found, incomplete_rate="share" if pays else "full")


def _resolved_rule(given: Mapping[str, Any], settings: AggregationSettings, choice: Choice) -> AggregationSettings:
    """The settings with `rule: auto`, and the keys in `OUTER` that go with it, replaced."""
    if settings.rule != AUTO:
        return settings
    if settings.lora == "product":
        return dataclasses.replace(settings, rule="mean")
    own = {name for name in OUTER if name in given and given[name] != AUTO}
    chosen = {name: value for name, value in choice.aggregation.items() if name not in own}
    if chosen.get("rule") == "mean" and own - {"server_learning_rate"}:  # a momentum that is given wants one to use it
        chosen["rule"] = "nesterov"
    return dataclasses.replace(settings, **chosen)


def resolve_training(training: Sequence[TrainingSettings], state: str) -> list[TrainingSettings]:
    """Every facility's settings with `optimizer_state: auto` replaced by `state`."""
    return [
        dataclasses.replace(one, optimizer_state=cast(Any, state)) if one.optimizer_state == AUTO else one
        for one in training
    ]


def with_measured(
    training: Sequence[TrainingSettings], given: Sequence[Collection[str]], choice: Choice
) -> list[TrainingSettings]:
    """Every facility's settings with those that were measured with the choice of `rule: auto`.

    `given`: the keys of `training:` that federation.yml writes for each facility; they are kept, and of
    `optimizer_parameters` those that it writes. What was measured was one optimizer with the choice's optimizer state:
    where a facility has others, its settings stay as they are.
    """
    optimizer = "adamw" if choice.row is None else choice.row.optimizer
    return [
        dataclasses.replace(one, **_measured_for(one, own, choice.training))
        if (one.optimizer, one.optimizer_state) == (optimizer, choice.optimizer_state)
        else one
        for one, own in zip(training, given, strict=True)
    ]


def _measured_for(one: TrainingSettings, own: Collection[str], measured: Mapping[str, Any]) -> dict[str, Any]:
    """What one facility takes over of the settings that were measured."""
    taken = {key: value for key, value in measured.items() if key not in own}
    if parameters := measured.get("optimizer_parameters"):
        taken["optimizer_parameters"] = parameters | one.optimizer_parameters
    return taken


def may_share(training: Sequence[TrainingSettings], settings: AggregationSettings) -> bool:
    """Whether second moments may be shared: whole models under a mean, moments kept, and no facility says otherwise."""
    averaged = settings.aggregation_rule == "mean" or settings.weighs_rows
    return averaged and all(
        one.keep_optimizer
        and not one.lora.rank
        and one.optimizer_state != "personal"
        and OPTIMIZERS.get(one.optimizer).shares_second_moments
        for one in training
    )


def situation_of(
    training: Sequence[TrainingSettings], rounds: int, *, pretrained: bool, parameters: int | None
) -> Situation:
    """What `auto` looks at."""
    steps = math.exp(sum(math.log(one.steps) for one in training) / len(training))
    optimizers = {one.optimizer for one in training}
    return Situation(
        facilities=len(training),
        rounds=rounds,
        steps=max(1, round(steps)),
        pretrained=pretrained,
        parameters=parameters,
        optimizer=optimizers.pop() if len(optimizers) == 1 else "adamw",
        adapters=any(one.lora.rank for one in training),
    )


def choice_of(
    training: Sequence[TrainingSettings],
    rounds: int,
    settings: AggregationSettings,
    *,
    pretrained: bool,
    parameters: int | None,
) -> Choice:
    """What `auto` means in this federation, and why."""
    situation = situation_of(training, rounds, pretrained=pretrained, parameters=parameters)
    return choose_aggregation(situation, may_share=may_share(training, settings))


def model_at(path: Path) -> Checkpoint | None:
    """The headers of the model that a federation starts from; None where there is none to read."""
    try:
        return open_checkpoint(path)
    except (CrossFedError, OSError):
        return None


def parameters_of(model: Checkpoint | None) -> int | None:
    """How many values a model's tensors hold; None where there is no model."""
    return None if model is None else sum(entry.elements for entry in model.tensors.values())


def looks_pretrained(model: Checkpoint | None) -> bool:
    """Whether a checkpoint was trained: some normalisation weight is neither 0 nor 1, as every one is when new.

    True where there is no model, or no such weight, to decide by.
    """
    if model is None:
        return True
    try:
        norms = [entry for name, entry in model.tensors.items() if _is_norm(name, entry)]
        with Opened() as read:
            return not norms or any(not np.isin(_values(entry, read), (0.0, 1.0)).all() for entry in norms)
    except (CrossFedError, OSError):
        return True


def _is_norm(name: str, entry: TensorEntry) -> bool:
    return len(entry.shape) == 1 and "norm" in name.lower() and entry.dtype in STORAGE and entry.dtype != "F64"


def _values(entry: TensorEntry, read: Opened) -> Any:
    stored = np.empty(entry.elements, STORAGE[entry.dtype])
    read(entry, 0, stored.data.cast("B"))
    values = np.empty(entry.elements, np.float32)
    widen(stored, entry.dtype, values)
    return values
