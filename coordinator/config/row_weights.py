"""Whether facilities can count by their squared gradients, row by row: what a rule that looks at them needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from coordinator.aggregation.settings import AggregationSettings
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.settings import TrainingSettings


def with_row_weights(
    aggregation: AggregationSettings, training: Mapping[str, TrainingSettings], *, masked: bool, chosen: bool
) -> tuple[AggregationSettings, str]:
    """The settings, and what is left out of them: a rule that was `chosen` for `auto` and looks at squared gradients,
    where they do not travel. Raises `ConfigurationError` where such a rule was given.

    `training`: of each facility, as resolved. `masked`: updates are.
    """
    reason = row_weights_obstacle(training, masked=masked) if aggregation.weighs_rows else None
    if reason is None:
        return aggregation, ""
    if chosen:
        plain = dataclasses.replace(aggregation, rule=aggregation.server_optimizer)
        return plain, f"; but by the weighted mean, as {reason}"
    raise ConfigurationError(
        f"aggregation.rule is {aggregation.rule!r}, which weighs facilities by their second moments, and {reason}; "
        f"expected the mean with a server optimizer, such as {aggregation.server_optimizer!r}",
        key="aggregation.rule",
    )


def row_weights_obstacle(training: Mapping[str, TrainingSettings], *, masked: bool) -> str | None:
    """Why the second moments of all facilities' steps are not there to see; None where they are."""
    if masked:
        return "privacy.secure_aggregation shows the coordinator their sum alone"
    for name, one in training.items():
        if one.optimizer_state != "shared":
            return f"training.optimizer_state of {name!r} is {one.optimizer_state!r}, so that its stay there"
        if one.optimizer_state_form != "factors":
            return f"training.optimizer_state_form of {name!r} is {one.optimizer_state_form!r}, which has no row means"
        if (every := one.optimizer_state_every) > 1:
            return f"training.optimizer_state_every of {name!r} is {every}, so that they travel in one round of {every}"
        if one.drift_correction:
            return f"training.drift_correction of {name!r} is true: corrections cancel in one mean for all rows alone"
    return None
