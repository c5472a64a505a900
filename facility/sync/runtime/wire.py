"""What travels between a rank and the scheduler: one JSON object per line, small, from authenticated peers only."""

from __future__ import annotations

import json
from typing import Any

from facility.exchange.json_text import parse_values

LINE_BYTES = 1 << 20
"""Longest line either side accepts."""


def encode_line(message: dict[str, Any]) -> bytes:
    """One line that `decode_line` reads. Raises `ValueError` for NaN or infinity."""
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode_line(line: bytes) -> dict[str, Any]:
    """Raises `ValueError` for anything but an object."""
    message = parse_values(line)
    if not isinstance(message, dict):
        raise ValueError("expected an object")
    return message
