"""How preferences are learned: part of `training:`."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Lt

from facility.exchange.text import Line
from facility.exchange.validation import Positive, validated

BENEATH = "base"
"""In place of the path of a reference model: the model beneath the adapters that are trained."""


@validated(frozen=True, kw_only=True)
class PreferenceSettings:
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290), for datasets of `--task preference`."""

    beta: Positive[float] = 0.1
    """How strongly the model is held to the reference: the lower, the further it may go."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """Share of the preferences that are taken to be wrong (conservative DPO)."""
    reference: Line = ""
    """The reference model at the facility (as `layout.plan`), for one that took no part in round 0; `base`: the model
    beneath the adapters; empty: the model of round 0, which is that one where adapters are trained that no initial
    model brings."""
