"""What the values of a problem must be, or a `ConfigurationError` says what they are."""

from __future__ import annotations

import math

from facility.exchange.errors import ConfigurationError


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigurationError(message)


def require_finite(**values: float) -> None:
    for name, value in values.items():
        require(math.isfinite(value) and value >= 0, f"{name} is {value}, expected a finite number, 0 or more")
