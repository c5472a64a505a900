"""Learning rate over the whole federation: one warm-up, one decay, whatever the number of rounds."""

from __future__ import annotations

import math

from facility.exchange.messages.settings import TrainingSettings


def scheduled_step(round: int, progress: float, *, steps: int, planned: int) -> int:
    """Where the schedule stands after `progress` of the `steps` of a round that the settings give `planned` steps.

    A round of more or fewer steps passes over the same part of the schedule.
    """
    return round * planned + int(progress if steps == planned else progress * planned / steps)


def learning_rate(step: int, total_steps: int, settings: TrainingSettings) -> float:
    """Rate of optimizer step `step` (from 0) among the `total_steps` of all rounds together.

    Linear warm-up over `warmup_steps`, then the schedule's shape from the peak down to `minimum_learning_rate_ratio`
    times the peak at the last step.
    """
    peak, floor = settings.learning_rate, settings.learning_rate * settings.minimum_learning_rate_ratio
    if step < settings.warmup_steps:
        return peak * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return peak
    length = max(1, total_steps - 1 - settings.warmup_steps)
    done = min(1.0, (step - settings.warmup_steps) / length)
    share = (1 + math.cos(math.pi * done)) / 2 if settings.schedule == "cosine" else 1 - done
    return floor + (peak - floor) * share
