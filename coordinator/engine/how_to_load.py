"""Which call loads the model that a federation ends with: its own class, and adapters by way of their export."""

from __future__ import annotations

from pathlib import Path

from facility.exchange.checkpoints.adapters import CONFIG, class_in

FACTORIES = {
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForImageClassification": "AutoModelForImageClassification",
}
"""End of a class's name -> what of transformers loads it; others are causal language models."""


def how_to_load(model: Path, base: str = "BASE") -> str:
    """The call for a round's model at `model`; `base`: the path of the model that adapters were trained beside."""
    if (model / CONFIG).is_file():
        return f"adapters: python -m coordinator.model --export-adapter {model} --base {base} --out DIR"
    first = class_in(model)
    found = (factory for ending, factory in FACTORIES.items() if first.endswith(ending))
    return f"{next(found, 'AutoModelForCausalLM')}.from_pretrained"
