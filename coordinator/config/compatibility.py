"""Settings that cannot be combined, as one error at its line of federation.yml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.aggregation.settings import AUTO
from coordinator.config.evaluation import COORDINATOR, EvaluationPlan
from coordinator.config.settings import RoundSettings
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.messages.trainer import TrainerSettings

AGGREGATION = ("rule", "weights", "accumulate", "output_dtype", "include", "exclude", "allowed_signers", "statistics")
"""Keys of `aggregation:` that mean something for a mean of whole models."""


def check_groups(data: Mapping[str, Any], settings: RoundSettings, training: Mapping[str, TrainingSettings]) -> None:
    """Raise `ConfigurationError`, with the key, for settings that `groups:` excludes.

    `data`: the file as written. `training`: each facility's settings by its name, in the order of the file.
    """
    assert settings.groups is not None
    groups, count = settings.groups, len(training)
    if count < 2:
        raise _error("groups", f"groups needs two facilities or more, found {count}: leave it out or add a facility")
    if groups.minimum > count:
        raise _error("groups.minimum", f"groups.minimum is {groups.minimum}, expected 1 to {count} (the facilities)")
    if (encoding := settings.sending.encoding) != "full":
        raise _error(
            "sending.encoding",
            f"sending.encoding is {encoding!r}, but facilities of different groups hold different models: "
            "with groups it is 'full'",
        )
    aggregation = settings.aggregation
    for key in data.get("aggregation") or {}:
        if key not in AGGREGATION:
            known = ", ".join(AGGREGATION)
            raise _error(
                f"aggregation.{key}",
                f"aggregation.{key} has no meaning with groups, which average by the mean: remove it ({known} may "
                "stay)",
            )
        if key == "rule" and aggregation.rule != "mean" and data["aggregation"]["rule"] != AUTO:
            raise _error(
                "aggregation.rule", f"aggregation.rule is {aggregation.rule!r}, expected 'mean' with groups, or none"
            )
    if aggregation.weights not in ("tokens", "equal"):
        raise _error(
            "aggregation.weights",
            f"aggregation.weights is {aggregation.weights!r}, expected tokens or equal with groups",
        )
    if settings.claims.action == "cap":
        raise _error("claims.action", "claims.action is 'cap', expected 'refuse' or 'off' with groups")
    for key in data.get("stop") or {}:
        raise _error(
            f"stop.{key}", f"stop.{key} looks at rounds of all facilities, which groups do not have: remove it"
        )
    if data.get("final_evaluation"):
        raise _error(
            "final_evaluation", "final_evaluation is true, but groups do not evaluate their final mean: remove it"
        )
    for number, (name, own_training) in enumerate(training.items()):
        if own_training.lora.rank:
            own = "lora" in (data["facilities"][number].get("training") or {})
            raise _error(
                f"facilities[{number}].training.lora" if own else "training.lora",
                f"facility {name!r} trains adapters (lora.rank {own_training.lora.rank}): groups average whole models",
            )


def check_trainers(described: Mapping[str, tuple[TrainerSettings, TrainingSettings]]) -> bool:
    """Whether some facility has a trainer of its own; `described` is by facility.

    Raises `ConfigurationError`, with the key, where settings need CrossFed's own trainer at all facilities.
    """
    others = [name for name, (trainer, _) in described.items() if not trainer.built_in]
    for name, (_, training) in described.items():
        if others and training.optimizer_state == "shared":
            raise _error(
                "training.optimizer_state",
                f"optimizer_state of facility {name!r} is 'shared', but facility {others[0]!r} has a trainer of its "
                "own, whose moments nobody knows: set it to 'personal' or 'auto'",
            )
    return bool(others)


def check_evaluation(evaluation: EvaluationPlan, names: Sequence[str]) -> None:
    """Raise `ConfigurationError` where the evaluation names a facility that there is not."""
    where, known = evaluation.facility, ", ".join(names)
    if where not in ("all", COORDINATOR, *names):
        raise _error(
            "evaluation.facility", f"evaluation.facility is {where!r}, expected all, coordinator or one of {known}"
        )
    held_out = evaluation.held_out
    if held_out is not None and held_out.facility not in names:
        raise _error(
            "evaluation.held_out.facility",
            f"evaluation.held_out.facility is {held_out.facility!r}, expected one of {known}",
        )


def check_comparison(evaluation: EvaluationPlan, settings: RoundSettings, *, other_trainers: bool, even: bool) -> None:
    """Raise `ConfigurationError`, with the key, for settings with which models cannot be compared at the end.

    `other_trainers`: some facility has a trainer of its own; `even`: steps are evened out between facilities.
    """
    if evaluation.facility == COORDINATOR and settings.groups is not None:
        raise _error(
            "evaluation.facility",
            "evaluation.facility is 'coordinator', which evaluates the models of rounds, and there are groups: name a "
            "facility",
        )
    if not evaluation.matrix:
        return
    if other_trainers:
        raise _error(
            "evaluation.matrix",
            "evaluation.matrix evaluates block by block, which a trainer of one's own does not: remove one of them",
        )
    if settings.privacy is not None and settings.privacy.differential is not None:
        raise _error(
            "evaluation.matrix",
            "evaluation.matrix gives away losses block by block, without the noise that privacy.differential promises: "
            "remove one of them",
        )
    aggregation = settings.aggregation
    if settings.groups is not None:
        raise _error(
            "evaluation.matrix",
            "evaluation.matrix compares models after the last round, which groups have not: remove it",
        )
    if aggregation.include or aggregation.exclude:
        raise _error(
            "evaluation.matrix",
            "evaluation.matrix evaluates whole models at facilities other than their own, and aggregation.include or "
            "aggregation.exclude keeps tensors at each: remove one of them",
        )
    if evaluation.alone and even:
        raise _error(
            "evaluation.alone",
            "evaluation.alone trains as many tokens alone as in the rounds, and rounds.steps: auto changes their steps "
            "from round to round: remove one of them",
        )
    if evaluation.alone and settings.masks:
        raise _error(
            "evaluation.alone",
            "evaluation.alone sends each facility's own model to the others, and privacy.secure_aggregation shows none "
            "of them: remove one of them (the matrix then has the initial and the global model)",
        )


def _error(key: str, message: str) -> ConfigurationError:
    return ConfigurationError(message, key=key)
