"""Settings that cannot be combined, as one error at its line of federation.yml."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from coordinator.aggregation.rules.registry import RULES
from coordinator.aggregation.settings import AggregationSettings
from coordinator.config.closing import ClosingSettings
from coordinator.config.evaluation import COORDINATOR, EvaluationPlan
from coordinator.config.settings import RoundSettings
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.messages.trainer import TrainerSettings
from facility.exchange.text import number_of

OF_ADAPTERS = ("rank", "freeze_a", "alpha", "rslora", "dora", "targets", "parameters", "modules_to_save")
"""Keys of `training.lora` that say what an adapter's factors are and stand for, and which of them differ."""


def check_quorum(closing: ClosingSettings, settings: RoundSettings, facilities: int) -> None:
    """Raise `ConfigurationError`, with the key, for what excludes rounds that close before all have delivered."""
    if isinstance(closing.quorum, int) and closing.quorum > facilities:
        raise _error(
            "rounds.quorum",
            f"rounds.quorum is {closing.quorum}, expected 1 to {facilities} (the number of facilities), a share below "
            "1, or all",
        )
    needed, least = closing.needed(facilities), settings.aggregation.fewest_updates
    if closing.late == "wait" or needed == facilities:
        return
    if needed < settings.minimum_facilities:
        raise _error(
            "minimum_facilities",
            f"rounds.quorum closes a round after {needed} of {facilities} facilities, and minimum_facilities is "
            f"{settings.minimum_facilities}: such a round ends the run; lower one or raise the other",
        )
    if needed < least:
        raise _error(
            "rounds",
            f"rounds.quorum closes a round after {needed} of {facilities} updates, and "
            f"{settings.aggregation.aggregation_rule} compares {least} or more: raise the quorum, or choose another "
            "rule",
        )
    if settings.masks:
        raise _error(
            "rounds",
            "rounds.quorum with privacy.secure_aggregation: masks cancel in the sum of one round alone, and a late "
            "update is of another; remove one of them",
        )
    if closing.late == "carry" and settings.keep_rounds == 1:
        raise _error(
            "keep_rounds",
            "rounds.late is 'carry' with keep_rounds 1: a late update is measured against the model that it started "
            "from, which must still be in the archive; set keep_rounds to 2 or more, or 0",
        )
    if closing.late == "carry" and settings.aggregation.lora == "product":
        raise _error(
            "aggregation.lora",
            "aggregation.lora is 'product' with rounds.late 'carry': the step of a late update's factors is added to "
            "those of a later round, and a round of products may have new ones, to which it means nothing; expected "
            "'factors', or rounds.late 'drop' or 'wait'",
        )


def _check_signing(settings: AggregationSettings, training: Mapping[str, TrainingSettings]) -> None:
    """Raise `ConfigurationError`, with the key, for a facility that would sign nothing where signatures are needed."""
    if not settings.allowed_signers:
        return
    if unsigned := [name for name, one in training.items() if not one.signing_key]:
        raise _error(
            "training.signing_key",
            f"aggregation.allowed_signers refuses what is not signed, and training.signing_key of {unsigned[0]!r} is "
            "empty: none of its updates would count; name its key there, or remove allowed_signers",
        )


def check_facilities(settings: AggregationSettings, training: Mapping[str, TrainingSettings]) -> None:
    """Raise `ConfigurationError`, with the key, for updates that could be averaged in no round of these facilities."""
    _check_signing(settings, training)
    least, number = settings.fewest_updates, len(training)
    if number < least:
        values = settings.values_of(RULES.get(settings.aggregation_rule))
        how = "".join(f" with {name} {value}" for name, value in values.items())
        raise _error(
            "aggregation.rule",
            f"aggregation.rule {settings.aggregation_rule}{how} compares {least} updates or more, and the federation "
            f"has {number} {'facility' if number == 1 else 'facilities'}: choose another rule",
        )
    if number >= settings.screen.minimum_updates and (most := settings.maximum_share) * number < 1 - 1e-9:
        raise _error(
            "aggregation.maximum_share",
            f"aggregation.maximum_share is {most}, and the shares of {number} facilities make 1 together: expected "
            f"{math.ceil(1000 / number) / 1000:g} or more (at that, all count alike)",
        )
    if isinstance(settings.weights, dict) and (missing := sorted(training.keys() - settings.weights.keys())):
        raise _error(
            "aggregation.weights",
            f"aggregation.weights names {', '.join(sorted(settings.weights)) or 'none'}, expected a number for each "
            f"facility: {', '.join(missing)} missing",
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
                "own, whose moments CrossFed cannot read: set it to 'personal' or 'auto'",
            )
        if others and training.first_moments != "off":
            raise _error(
                "training.first_moments",
                f"first_moments of facility {name!r} is 'mean', but facility {others[0]!r} has a trainer of its own, "
                "whose moments CrossFed cannot read: set it to 'off'",
            )
        if others and training.drift_correction:
            raise _error(
                "training.drift_correction",
                f"drift_correction of facility {name!r} is true, but facility {others[0]!r} has a trainer of its own, "
                "which corrects nothing: set it to false",
            )
    return bool(others)


def check_adapters(aggregation: AggregationSettings, training: Mapping[str, TrainingSettings]) -> None:
    """Raise `ConfigurationError`, with the key, where adapters cannot be averaged as the settings ask."""
    for key in OF_ADAPTERS if any(one.lora.rank for one in training.values()) else ():
        values = {name: getattr(one.lora, key) for name, one in training.items()}
        by_text = {str(sorted(value) if isinstance(value, list) else value): name for name, value in values.items()}
        if len(by_text) > 1:
            given = " and ".join(f"{text} for {name!r}" for text, name in by_text.items())
            raise _error(
                f"training.lora.{key}",
                f"lora.{key} is {given}; expected the same at all facilities, whose adapters are averaged (a `lora` of "
                "a facility's own takes the place of the federation's as a whole; trained_rank, dropout, base and "
                "quantize_base may differ)",
            )
    stated = {one.lora.base_sha256: name for name, one in training.items() if one.lora.base_sha256}
    if len(stated) > 1:
        both = " and ".join(f"{digest[:16]}... for {name!r}" for digest, name in stated.items())
        raise _error("training.lora.base_sha256", f"lora.base_sha256 is {both}; expected one base for all facilities")
    for name, one in training.items():
        if one.lora.base_sha256 and not one.lora.base:
            raise _error(
                "training.lora.base_sha256",
                f"lora.base_sha256 of facility {name!r} is stated without lora.base: the base is in the model that is "
                "sent, and verified with it; expected the base's directory at the facility, or no digest",
            )
        if one.lora.parameters and aggregation.lora == "product":
            raise _error(
                "aggregation.lora",
                f"aggregation.lora is 'product', but facility {name!r} trains adapters of fused experts "
                f"(lora.parameters {one.lora.parameters}), whose factors hold all experts: expected 'factors'",
            )
        if one.lora.freeze_a and aggregation.lora == "product":
            raise _error(
                "aggregation.lora",
                f"aggregation.lora is 'product', which gives adapters another A, but facility {name!r} trains B alone "
                "(lora.freeze_a): the mean of the factors is that of the products already; expected 'factors'",
            )


def check_moments(training: Mapping[str, TrainingSettings]) -> None:
    """Raise `ConfigurationError`, with the key, where facilities would average moments in unlike ways."""
    sharing = {name: one for name, one in training.items() if one.optimizer_state == "shared" or one.travelling_moments}
    for key in ("optimizer_state_form", "optimizer_state_every"):
        by_value = {getattr(one, key): name for name, one in sharing.items()}
        if len(by_value) > 1:
            given = " and ".join(f"{value!r} for {name!r}" for value, name in by_value.items())
            raise _error(f"training.{key}", f"{key} is {given}; expected the same at all facilities that share moments")


def check_drift(aggregation: AggregationSettings, training: Mapping[str, TrainingSettings], *, masked: bool) -> None:
    """Raise `ConfigurationError`, with the key, where drift cannot be corrected as the settings ask.

    `masked`: updates are masked.
    """
    on = [name for name, one in training.items() if one.drift_correction]
    if not on:
        return
    key = "training.drift_correction"
    if off := [name for name in training if name not in on]:
        raise _error(
            key,
            f"drift_correction is true for {on[0]!r} and false for {off[0]!r}: corrections cancel in the mean over all "
            "facilities alone; set it for all of them, or for none",
        )
    if len(on) < 2:
        raise _error(key, "drift_correction is true with a single facility: there is no other to drift from; remove it")
    if aggregation.aggregation_rule != "mean":
        raise _error(
            key,
            f"drift_correction is true under {aggregation.aggregation_rule}: corrections cancel in the weighted mean "
            "alone, and the mean walk, which moves every facility's steps, is not protected as that rule protects the "
            "model; expected the rule mean or auto (with any server optimizer), or drift_correction false",
        )
    if aggregation.lora == "product":
        raise _error(
            "aggregation.lora",
            "aggregation.lora is 'product', which has no step of a factor that a facility could correct; expected "
            "'factors' beside drift_correction true",
        )
    frozen = {name: sorted(one.freeze) for name, one in training.items()}
    if len({tuple(patterns) for patterns in frozen.values()}) > 1:
        raise _error(
            "training.freeze",
            f"training.freeze differs between facilities ({frozen}) beside drift_correction true: what one of them "
            "keeps frozen would hold the others back; freeze the same everywhere",
        )
    if masked:
        raise _error(
            key,
            "drift_correction is true with privacy.secure_aggregation: the mean walk is made of each facility's step "
            "over its own learning rates, which would have to be masked as a message of its own; that is not built: "
            "remove one of them",
        )


def check_evaluation(evaluation: EvaluationPlan, names: Sequence[str]) -> None:
    """Raise `ConfigurationError` where the evaluation names a facility that there is not, or data as one is named."""
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
    if held_out is not None and held_out.name in names:
        raise _error(
            "evaluation.held_out.name",
            f"evaluation.held_out.name is {held_out.name!r}, as reports call that facility's own data: choose another",
        )


def check_evaluates(evaluation: EvaluationPlan, training: Mapping[str, TrainingSettings]) -> None:
    """Raise `ConfigurationError` where the coordinator is to evaluate adapters without the model below them."""
    if evaluation.facility != COORDINATOR or not evaluation.tasks:
        return
    if alone := [name for name, one in training.items() if one.lora.base]:
        raise _error(
            "evaluation.facility",
            f"evaluation.facility is 'coordinator', but facility {alone[0]!r} has a training.lora.base, so that "
            "adapters alone travel and the coordinator has no model below them: name a facility, or all",
        )


def check_comparison(evaluation: EvaluationPlan, settings: RoundSettings, *, other_trainers: bool, even: bool) -> None:
    """Raise `ConfigurationError`, with the key, for settings with which models cannot be compared at the end.

    `other_trainers`: some facility has a trainer of its own; `even`: steps are evened out between facilities.
    """
    if not evaluation.matrix and not evaluation.last_models:
        return
    key = "evaluation.matrix" if evaluation.matrix else "evaluation.last_models"
    if other_trainers:
        raise _error(key, f"{key} evaluates block by block, which a trainer of one's own does not: remove one of them")
    if settings.privacy is not None and settings.privacy.differential is not None:
        raise _error(
            key,
            f"{key} gives away losses block by block, without the noise that privacy.differential promises: "
            "remove one of them",
        )
    _check_last_models(evaluation.last_models, settings)
    aggregation = settings.aggregation
    if aggregation.include or aggregation.personal:
        raise _error(
            key,
            f"{key} evaluates whole models at facilities other than their own, and aggregation.include or "
            "aggregation.exclude (or batch_norm: personal) keeps tensors at each: remove one of them",
        )
    if evaluation.alone and even:
        raise _error(
            "evaluation.alone",
            "evaluation.alone trains as many tokens alone as in the rounds, and rounds.steps changes their steps "
            "from round to round: remove one of them",
        )


def _check_last_models(count: int, settings: RoundSettings) -> None:
    """The archive must hold that many models at the end."""
    if count > settings.rounds:
        raise _error(
            "evaluation.last_models", f"evaluation.last_models is {count}, expected at most rounds, {settings.rounds}"
        )
    if settings.keep_rounds and count > settings.keep_rounds:
        raise _error(
            "evaluation.last_models",
            f"evaluation.last_models is {count}, but the archive keeps the models of "
            f"{number_of(settings.keep_rounds, 'round')}: set keep_rounds to {count} or more, or to 0 for all",
        )


def _error(key: str, message: str) -> ConfigurationError:
    return ConfigurationError(message, key=key)
