"""`evaluation:` in federation.yml: on which tasks the global model is evaluated, how often, and where."""

from __future__ import annotations

import dataclasses

from facility.exchange.messages.evaluation import EvaluationSettings
from facility.exchange.text import Line
from facility.exchange.validation import validated


@validated(frozen=True, kw_only=True)
class EvaluationPlan(EvaluationSettings):
    """What the facilities are asked to do, and which of them."""

    facility: Line = "all"
    """Name of the facility whose jobs evaluate, or `all`."""

    def for_facility(self, name: str) -> EvaluationSettings:
        """What one facility is asked to do: nothing where another one evaluates."""
        if self.facility not in ("all", name):
            return EvaluationSettings()
        return EvaluationSettings(
            **{key.name: getattr(self, key.name) for key in dataclasses.fields(EvaluationSettings)}
        )
