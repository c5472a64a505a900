"""Low-rank adapters in checkpoints: their names, and the `adapter_config.json` that peft reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from facility.exchange.messages.layout import LoraSettings

A, B = ".lora_A.", ".lora_B."
PREFIX = "base_model.model."
"""What peft puts before the names of the layers."""
CONFIG = "adapter_config.json"


def is_adapter(name: str) -> bool:
    """Whether a tensor or parameter of that name belongs to an adapter."""
    return A in name or B in name


def write_adapter_config(directory: Path, settings: LoraSettings, adapters: Iterable[str], base: str = "") -> None:
    """Write the configuration of the adapters with these names, without paths of any facility."""
    targets = sorted({name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in adapters})
    configuration: dict[str, Any] = {
        "peft_type": "LORA",
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": targets,
        "bias": "none",
        "inference_mode": True,
        "base_model_name_or_path": base,
    }
    (directory / CONFIG).write_text(json.dumps(configuration, indent=2) + "\n")
