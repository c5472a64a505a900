"""Which call loads the model that a federation ends with: its own class, and adapters by way of their export."""

from __future__ import annotations

from pathlib import Path

from facility.exchange.checkpoints.adapters import CONFIG, class_in
from facility.exchange.checkpoints.task_class import FACTORIES, task_of_classes


def how_to_load(model: Path, base: str = "BASE") -> str:
    """The call for a round's model at `model`; `base`: the path of the model that adapters were trained beside."""
    if (model / CONFIG).is_file():
        return f"adapters: python -m coordinator.model --export-adapter {model} --base {base} --out DIR"
    return f"{FACTORIES[task_of_classes([class_in(model)])]}.from_pretrained"
