"""What a workflow step leaves for its engine: `cwl.output.json` in the working directory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from facility.exchange.durable import write_json
from facility.exchange.links import link_tree
from facility.exchange.manifest import NAME, read_manifest


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
