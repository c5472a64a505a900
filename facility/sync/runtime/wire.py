"""What travels between a rank and the scheduler: one JSON object per line, small, from authenticated peers only."""

from __future__ import annotations

import json
import socket
from typing import Any

LINE_BYTES = 1 << 20
"""Longest line either side accepts."""


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Raises `ValueError` for anything but an object."""
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("expected an object")
    return message


def address_of_this_node(store_host: str | None) -> str:
    """The address by which the host of the store reaches this node (loopback when everything is on one)."""
    if store_host in (None, "", "localhost", "127.0.0.1", "::1"):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((store_host, 9))  # no packet is sent: only the route is looked up
        return str(probe.getsockname()[0])
