"""Secure aggregation in the rendered settings of a facility (`masking`); absent: updates travel as they are."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge

from facility.exchange.errors import ConfigurationError
from facility.exchange.text import Line, Name
from facility.exchange.validation import NonNegative, Positive, Share, validated

ENCODING = "masked"
"""What the manifest of a masked update says as its encoding."""
DETAILS = "masking"
"""In a masked update's `extra`: bits, roster, clip_norm, adapters, and the limits of second moments."""


GROWTH = 10.0
"""Limit of what a facility sends: this many times each parameter's mean second moment at the start of the round."""


@validated(frozen=True, kw_only=True)
class MaskedMoments:
    """How second moments travel under masks (`facility.exchange.masking.moments`)."""

    range: Positive[float]
    """The largest that is sent: `training.clip_norm` squared."""
    every: Positive[int] = 1
    """Rounds between two that send them."""

    @property
    def common(self) -> dict[str, float]:
        """What must be equal at every facility, and what each signs that it has kept to."""
        return {"range": float(self.range), "every": self.every, "growth": GROWTH}


def due_after(moments: MaskedMoments | None, round: int) -> MaskedMoments | None:
    """The moments where they are sent after a round, counted from 0; else None."""
    return moments if moments is not None and (round + 1) % moments.every == 0 else None


@validated(frozen=True, kw_only=True)
class MaskingSettings:
    """How this facility masks its updates."""

    bits: Literal[16, 32]
    threshold: Annotated[int, Ge(2)]
    """Facilities that must answer for the masks to come off."""
    minimum_sum: Annotated[int, Ge(2)] = 3
    """Fewest updates in a sum that is unmasked."""
    facilities: list[Name]
    """All of the federation."""
    weights: Literal["tokens", "samples", "equal"] = "tokens"
    """What an update counts, of the claims in its signed keys."""
    maximum_share: Share = 0.5
    """Largest share of one of three or more facilities."""
    clip_norm: NonNegative[float] = 0.0
    """L2 norm to which this facility scales its step down; 0: off."""
    peer_signers: Line
    """Allowed-signers file at this facility with the key of every facility."""
    moments: MaskedMoments | None = None
    """Second moments that travel under masks; absent: none do."""

    def moments_due(self, round: int) -> MaskedMoments | None:
        """`moments` in a round after which they are sent, else None."""
        return due_after(self.moments, round)

    @property
    def common(self) -> dict[str, Any]:
        """What must be equal at every facility, as JSON: all but where its own file of signers lies."""
        return {
            "bits": self.bits,
            "threshold": self.threshold,
            "minimum_sum": self.minimum_sum,
            "facilities": sorted(self.facilities),
            "weights": self.weights,
            "maximum_share": float(self.maximum_share),
            "clip_norm": float(self.clip_norm),
            "moments": None if self.moments is None else self.moments.common,
        }

    def __post_init__(self) -> None:
        count = len(self.facilities)
        if count < 3 or not count / 2 < self.threshold <= count:
            raise ConfigurationError(
                f"threshold is {self.threshold} of {count} facilities, expected more than half of three or more"
            )
        if self.minimum_sum > count:
            raise ConfigurationError(f"minimum_sum is {self.minimum_sum}, and there are {count} facilities")
