"""What every connector that copies to or from a facility has in common, whatever carries the bytes."""

from __future__ import annotations

import time
from pathlib import Path

from coordinator.events.event import emit
from facility.exchange.messages.manifest import manifest_if_any

BESIDE_BYTES = 256 << 20
"""Of an update, for reports and tokenizer."""


def largest_update(model: Path) -> int | None:
    """Bytes that an update of this model may have; None for a directory that is not a model of known size.

    float32 weights, as much again for what may come beside them, and `BESIDE_BYTES`.
    """
    manifest = manifest_if_any(model)
    if manifest is None or not manifest.parameters:
        return None
    return BESIDE_BYTES + 2 * 4 * manifest.parameters


def report_copy(facility: str, way: str, path: str, size: int, start: float) -> None:
    """Report a finished copy of `size` bytes that began at `start` (of `time.monotonic`); `way`: `to` or `from`."""
    seconds = round(time.monotonic() - start, 3)
    emit("moved", facility=facility, way=way, what=Path(path).name, bytes=size, seconds=seconds)
