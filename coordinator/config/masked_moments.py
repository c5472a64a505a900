"""Second moments that facilities share under secure aggregation: what they need, and what is agreed of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from facility.exchange.masking.moments import error_of
from facility.exchange.messages.masking import MaskedMoments
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.text import rounded_down


def masked_moments(training: Sequence[TrainingSettings]) -> MaskedMoments | None:
    """How second moments travel under masks; None: they are personal. `training`: of all facilities, which agree."""
    first = training[0]
    if first.optimizer_state != "shared":
        return None
    return MaskedMoments(range=first.clip_norm**2, every=first.optimizer_state_every)


def masked_moments_obstacle(training: TrainingSettings, facilities: int) -> tuple[str, str] | None:
    """The key of `training:` that keeps second moments from being shared under masks, and why; None: nothing does."""
    secure = "with privacy.secure_aggregation"
    if training.optimizer != "adamw":
        return (
            "optimizer",
            f"is {training.optimizer!r}, which keeps second moments of some parameters alone, and which is not agreed "
            f"under masks; expected 'adamw' where optimizer_state is 'shared' {secure}, or 'personal' there",
        )
    if training.optimizer_state_form != "factors":
        return (
            "optimizer_state_form",
            f"is {training.optimizer_state_form!r}: a value under masks takes 8 bytes, and codes of a byte do not add "
            f"up, so row and column means alone are masked; expected 'factors' {secure}",
        )
    if not training.clip_norm:
        return (
            "clip_norm",
            "is 0: second moments are sent as multiples of one unit, for which their largest value has to be known "
            f"before a round; expected above 0 where optimizer_state is 'shared' {secure}, or 'personal' there",
        )
    root = math.sqrt(error_of(training.clip_norm**2, facilities))
    if root > training.epsilon:
        most = rounded_down(training.clip_norm * training.epsilon / root)
        return (
            "clip_norm",
            f"is {training.clip_norm:g}: the root of a second moment would be off by up to {root:.2g}, more than "
            f"epsilon ({training.epsilon:g}); expected at most {most:g} "
            f"where optimizer_state is 'shared' {secure}, or optimizer_state 'personal'",
        )
    return None
