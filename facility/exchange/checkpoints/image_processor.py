"""Which image processor a directory holds: a digest that equal ones share, and the numbers that pixels are scaled by.

A Hugging Face image classifier carries `preprocessor_config.json`: to which size images are brought, and the mean and
standard deviation that their values are normalised by. The digest covers these and omits what transformers rewrites
when it saves the file again: the names of classes, which end in Fast or Pil by the backend, and keys without a value.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facility.exchange.checkpoints.model_files import read_model_file
from facility.exchange.errors import InputError
from facility.exchange.text import number_of

FILE = "preprocessor_config.json"
MEANING = (
    "do_resize",
    "size",
    "resample",
    "crop_pct",
    "do_center_crop",
    "crop_size",
    "do_rescale",
    "rescale_factor",
    "rescale_offset",
    "include_top",
    "do_flip_channel_order",
    "do_normalize",
    "image_mean",
    "image_std",
    "do_convert_rgb",
)
"""Keys that decide which numbers a model sees."""
RESCALE = 1 / 255
MOST_CHANNELS = 64


@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """(value x rescale - mean) / std, by channel."""

    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


def image_processor_digest(directory: Path) -> str | None:
    """`preprocessor_config.json:SHA256` of what the file in a directory says; None where there is none.

    Raises `InputError` for a damaged file.
    """
    raw = read_processor(directory)
    if raw is None:
        return None
    meaning = {key: raw[key] for key in MEANING if raw.get(key) is not None}
    text = json.dumps(meaning, sort_keys=True, ensure_ascii=True)
    return f"{FILE}:{hashlib.sha256(text.encode()).hexdigest()}"


def read_processor(directory: Path) -> dict[str, Any] | None:
    """What the file says; None where there is none. Raises `InputError` for a damaged file."""
    return read_model_file(directory, FILE) if (Path(directory) / FILE).is_file() else None


def read_normalisation(raw: dict[str, Any], *, channels: int, where: str) -> Normalisation:
    """How pixel values are scaled. Raises `InputError` for numbers that no image can be scaled by."""
    rescale = raw.get("rescale_factor", RESCALE) if raw.get("do_rescale", True) else 1.0
    mean = raw.get("image_mean", 0.5) if raw.get("do_normalize", True) else 0.0
    std = raw.get("image_std", 0.5) if raw.get("do_normalize", True) else 1.0
    means, stds = (_by_channel(value, channels) for value in (mean, std))
    numbers = [rescale, *means, *stds]
    if not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers) or rescale <= 0 or min(stds) <= 0:
        raise InputError(
            f"{where} has rescale_factor {rescale!r:.40}, image_mean {mean!r:.60} and image_std {std!r:.60}: expected "
            f"finite numbers for {number_of(channels, 'channel')}, of which the first and the last are above 0"
        )
    return Normalisation(rescale=float(rescale), mean=tuple(map(float, means)), std=tuple(map(float, stds)))


def channels_of(raw: dict[str, Any]) -> int:
    """Channels that the means are given for; 3 where none are."""
    mean = raw.get("image_mean")
    return len(mean) if isinstance(mean, list) and 0 < len(mean) <= MOST_CHANNELS else 3


def _by_channel(value: Any, channels: int) -> list[Any]:
    """One number a channel; [nan] where the value is not that."""
    found = list(value) if isinstance(value, list) else [value] * channels
    return found if len(found) == channels and not any(isinstance(n, bool | str) for n in found) else [math.nan]
