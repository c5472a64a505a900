"""`evaluation:` in federation.yml: on which tasks and data models are evaluated, how often, and where."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from typing import Any

from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.evaluation import HELD_OUT, EvaluationSettings, FacilityEvaluation, is_due
from facility.exchange.text import DatasetPath, Line, Name
from facility.exchange.validation import AtLeastOne, NonNegative, validated

COORDINATOR = "coordinator"
"""In place of a facility's name."""
MOST_NAMED = 3
"""Tasks that a sentence names."""


@validated(frozen=True, kw_only=True)
class HeldOut:
    """Data that no facility trains on, to see what was forgotten."""

    facility: Name
    """Name of the facility that has it."""
    dataset: DatasetPath
    """Prepared dataset there (facility.prepare), of which the validation split is read."""
    name: Line = HELD_OUT
    """What reports call it, such as `wikitext-103`."""


@validated(frozen=True, kw_only=True)
class ComparisonSettings:
    """The matrix of data and models after the last round, as the coordinator's steps need it."""

    alone: bool = False
    """True where facilities train alone as well."""
    held_out: str = ""
    """Facility that has the held-out data, which no facility trains on; empty: none."""
    held_out_name: str = ""
    updates: bool = True
    """False where the coordinator cannot see single updates: each facility then evaluates its own itself."""
    models_per_job: AtLeastOne[int] = 8
    matrix: bool = True
    """False where nothing is compared but candidates for the final model."""
    last_models: NonNegative[int] = 0
    """Global models of the last rounds whose mean is such a candidate; 0: none."""


@validated(frozen=True, kw_only=True)
class AskedTasks:
    """Whom the federation asks for scores on tasks, and in which rounds: no others' are believed."""

    facilities: list[Name] = field(default_factory=list)
    """Facilities whose jobs evaluate models on tasks."""
    every: AtLeastOne[int] = 1
    """Rounds between two evaluations; the final model is always evaluated."""

    def objection(self, facility: str, scores: Sequence[Mapping[str, Any]], *, round: int, rounds: int) -> str:
        """Why the scores that a facility reported of a round are left out; '' where they are what it was asked for.

        Names of tasks are not compared: lm-eval reports those of a group under the names of its parts.
        """
        if facility not in self.facilities:
            why = "no task was asked of it"
        elif not is_due(self.every, round, rounds):
            why = f"round {round} is not due for evaluation (evaluation.every is {self.every})"
        else:
            return ""
        tasks = sorted({str(one["task"]) for one in scores})
        more = f" and {len(tasks) - MOST_NAMED} more" if len(tasks) > MOST_NAMED else ""
        named = f" ({', '.join(tasks[:MOST_NAMED])}{more})" if tasks else ""
        return f"scores on tasks{named} that {facility} reported are left out: {why}"


@validated(frozen=True, kw_only=True)
class EvaluationPlan(EvaluationSettings):
    """What the facilities are asked to do, and which of them."""

    facility: Line = "all"
    """Name of the facility whose jobs evaluate, or `all`; `coordinator`: the coordinator's own machine, beside the
    facilities' jobs, where lm-eval has to be installed."""
    matrix: bool = False
    """After the last round, evaluate the initial model, every facility's own last update and the global model on every
    facility's validation data, with bootstrap intervals: one job more at each facility, which receives the updates of
    the others. Only figures leave a facility. With `privacy.secure_aggregation` each facility evaluates its own update
    itself and sends it to no other facility."""
    alone: bool = False
    """Add to the matrix each facility's model trained alone, for as many tokens as it trained on in the federation:
    as many jobs, and node-hours, as its rounds took. Needs `matrix`."""
    held_out: HeldOut | None = None
    """Data that no facility trains on, as a further row of the matrix: what the model forgets. Needs `matrix`."""
    models_per_job: AtLeastOne[int] = 8
    """Models of the matrix that a facility is sent at once: they lie on its disk together."""
    last_models: NonNegative[int] = 0
    """After the last round, evaluate the mean of the global models of this number of last rounds beside the global
    model, on every facility's validation data. Where its loss is lower (mean over facilities, and without any one of
    them) it is the final model: what the report names and `crossfed publish` takes. One job more at each facility,
    which `matrix` shares; 0: off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("alone", "held_out"):
            if getattr(self, key) and not self.matrix:
                raise ConfigurationError(
                    f"{key} adds to the matrix of data and models, which is off: set matrix to true, or remove it",
                    key=key,
                )

        if self.last_models == 1:
            raise ConfigurationError(
                "last_models is 1, which is the global model itself; expected 2 or more, or 0 for off",
                key="last_models",
            )

    def for_coordinator(self, names: Collection[str]) -> EvaluationSettings | None:
        """What the coordinator is asked to do itself; None: nothing. `names`: the facilities'."""
        if self.facility != COORDINATOR or COORDINATOR in names or not self.tasks:
            return None
        return EvaluationSettings(
            **{key.name: getattr(self, key.name) for key in dataclasses.fields(EvaluationSettings)}
        )

    def for_facility(self, name: str, *, masked: bool) -> FacilityEvaluation:
        """What one facility is asked to do: no tasks where another one evaluates. `masked`: updates are."""
        held_out = self.held_out.dataset if self.held_out is not None and self.held_out.facility == name else ""
        values: dict[str, Any] = {}
        if self.facility in ("all", name):
            values = {key.name: getattr(self, key.name) for key in dataclasses.fields(EvaluationSettings)}
        return FacilityEvaluation(held_out=held_out, own_models=masked and self.matrix, **values)

    def asked(self, names: Collection[str]) -> AskedTasks:
        """Which of the facilities `names` are asked for scores on tasks, and when."""
        facilities = [name for name in names if self.for_facility(name, masked=False).tasks]
        return AskedTasks(facilities=facilities, every=self.every)

    def comparison(self, *, masked: bool) -> ComparisonSettings | None:
        """What follows the last round; None where no models are compared. `masked`: updates are."""
        if not self.matrix and not self.last_models:
            return None
        return ComparisonSettings(
            alone=self.alone,
            held_out=self.held_out.facility if self.held_out is not None else "",
            held_out_name=self.held_out.name if self.held_out is not None else "",
            updates=self.matrix and not masked,
            models_per_job=self.models_per_job,
            matrix=self.matrix,
            last_models=self.last_models,
        )
