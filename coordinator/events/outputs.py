"""What a workflow step leaves for its engine: `cwl.output.json` in the working directory."""

from __future__ import annotations

from pathlib import Path

from facility.exchange.files.durable import write_json
from facility.exchange.files.links import link_tree


def write_outputs(*, model: Path, round: int, proceed: bool) -> None:
    """Offer `model` (hard-linked as `./model`: no bytes copied), the round's number and the loop's condition."""
    target = Path.cwd() / "model"
    link_tree(model, target)
    write_json(
        Path.cwd() / "cwl.output.json",
        {"model": {"class": "Directory", "path": str(target)}, "round": round, "proceed": proceed},
    )
