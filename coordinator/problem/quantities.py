"""Numbers that carry their unit in their key: `memory_megabytes`, `delay_ms`, `bandwidth_gbit_per_s`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from facility.exchange.errors import ConfigurationError

SIZE = {
    "bytes": 1.0,
    "kilobytes": 1e3,
    "megabytes": 1e6,
    "gigabytes": 1e9,
    "kibibytes": 2.0**10,
    "mebibytes": 2.0**20,
    "gibibytes": 2.0**30,
}
"""Bytes in each unit of size."""
TIME = {"seconds": 1.0, "s": 1.0, "ms": 1e-3, "milliseconds": 1e-3, "us": 1e-6, "microseconds": 1e-6}
"""Seconds in each unit of time."""
RATE = {
    "bytes_per_second": 1.0,
    "megabytes_per_second": 1e6,
    "gigabytes_per_second": 1e9,
    "mbit_per_s": 1e6 / 8,
    "gbit_per_s": 1e9 / 8,
}
"""Bytes per second in each unit of bandwidth."""


def find(
    raw: Mapping[str, Any], stem: str, units: Mapping[str, float], *, where: str, file: Path | str | None
) -> tuple[str, float] | None:
    """The key `stem_<unit>` of `raw` and its factor, None if absent. Two such keys or an unknown unit is an error."""
    keys = [key for key in raw if key.startswith(stem + "_")]
    known = {f"{stem}_{unit}": factor for unit, factor in units.items()}
    for key in keys:
        if key not in known:
            raise ConfigurationError(
                f"{where}.{key}: unknown unit {key[len(stem) + 1 :]!r} of {stem}; known units are {', '.join(units)}",
                file=file,
                key=f"{where}.{key}",
            )
    if len(keys) > 1:
        raise ConfigurationError(f"{where} holds {' and '.join(keys)}; give one of them", file=file)
    return (keys[0], known[keys[0]]) if keys else None


def numbers(value: Any, name: str, shape: tuple[int, ...], file: Path | str | None) -> np.ndarray:
    """`value` as finite numbers of the given shape; -1 in `shape` takes any length."""
    try:
        array = np.array(value, dtype=float)
    except (TypeError, ValueError, OverflowError):
        described = "rows of unequal length, or something that is not a number"
        raise ConfigurationError(f"{name} holds {described}", file=file, key=name) from None
    if array.ndim != len(shape) or any(e not in (-1, g) for e, g in zip(shape, array.shape, strict=True)):
        got = "x".join(map(str, array.shape)) or "one number"
        expected = "x".join("any" if e == -1 else str(e) for e in shape) or "one number"
        raise ConfigurationError(f"{name} is {got}, expected {expected}", file=file, key=name)
    if np.isnan(array).any():
        place = "".join(f"[{i}]" for i in np.argwhere(np.isnan(array))[0])
        raise ConfigurationError(f"{name}{place} is not a number (NaN or null); measure it again", file=file, key=name)
    return array
