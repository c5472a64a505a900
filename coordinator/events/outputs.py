"""What a workflow step leaves for its engine: `cwl.output.json` in the working directory; and how a step waits."""

from __future__ import annotations

import dataclasses
import threading
import time
from contextlib import suppress
from pathlib import Path

from facility.exchange.files.durable import write_json
from facility.exchange.files.links import link_tree
from facility.exchange.messages.manifest import NAME, read_manifest

WAITS = "crossfed-waits"
"""Name of a process that waits for others (proc(5), comm: at most 15 characters): it does not count as activity."""


def wait(seconds: float) -> None:
    """Sleep, and where this is a process's main thread, under the name `WAITS`."""
    name, own = Path("/proc/self/comm"), ""
    with suppress(OSError):
        if threading.current_thread() is threading.main_thread():
            own = name.read_text().strip()
            name.write_text(WAITS)
    time.sleep(seconds)
    with suppress(OSError):
        if own:
            name.write_text(own)


def write_outputs(*, model: Path, round: int, proceed: bool, facility: str | None = None) -> None:
    """Offer `model` (hard-linked as `./model`: no bytes copied), the round's number and the loop's condition.

    Where facilities are not all in the same round, the model is addressed to `facility` and its round; the same bytes,
    under a manifest of its own.
    """
    target = Path.cwd() / "model"
    link_tree(model, target)
    if facility is not None:
        addressed = dataclasses.replace(read_manifest(target), round=round, facility=facility)
        write_json(target / NAME, dataclasses.asdict(addressed))
    write_json(
        Path.cwd() / "cwl.output.json",
        {"model": {"class": "Directory", "path": str(target)}, "round": round, "proceed": proceed},
    )
