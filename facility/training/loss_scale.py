"""The factor of the loss in float16, which keeps small gradients above its least number and large ones below its most.

P. Micikevicius et al., "Mixed precision training", ICLR 2018, arXiv 1710.03740, section 3.2, with the rule of
`torch.amp.GradScaler`: half as large after a step whose gradients overflow, twice as large after many that do not.
"""

from __future__ import annotations

from dataclasses import dataclass

BEGIN = 2.0**15
LEAST = 1.0
STEADY = 500
"""Steps in a row without overflow before the factor is doubled."""


@dataclass(kw_only=True)
class LossScale:
    """By what the loss is multiplied before its backward pass, and the gradients are divided after it."""

    adapts: bool
    """Float16; else the factor is 1 for good."""
    value: float = 0.0
    """0: where it begins."""
    steady: int = 0
    """Steps in a row that did not overflow since the factor changed."""

    def __post_init__(self) -> None:
        if not self.adapts or not self.value:
            self.value, self.steady = BEGIN if self.adapts else 1.0, 0

    def step_was_good(self) -> None:
        """Count a step whose loss and gradients were finite."""
        self.steady += 1
        if self.adapts and self.steady >= STEADY:
            self.value, self.steady = 2 * self.value, 0

    def overflowed(self) -> bool:
        """Halve the factor after a step whose gradients were not finite; False where it is at its least already."""
        self.steady = 0
        if not self.adapts or self.value <= LEAST:
            return False
        self.value /= 2
        return True
