"""Does the model have a chat template, where facilities train it on conversations rendered by one?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from coordinator.preflight.probe_answer import DatasetAnswer
from coordinator.preflight.row import Row, warning
from facility.exchange.checkpoints.model_files import model_file_if_any


def check_chat_template(model: Path, datasets: Mapping[str, DatasetAnswer]) -> list[Row]:
    """A warning where whoever gets the final model could not ask it as it was trained; [] where nothing is odd.

    `datasets`: what each facility's probe said of its dataset.
    """
    if not any(answer.chat_template_sha256 for answer in datasets.values()) or carries_template(model):
        return []
    return [
        warning(
            "coordinator",
            "chat template",
            f"the datasets are conversations in words of a chat template, and {model} has none: the final model could "
            "not be asked in those words",
            f"put the file that --chat-template named into {model} as chat_template.jinja before the first round",
        )
    ]


def carries_template(model: Path) -> bool:
    """Whether a model's tokenizer has a chat template, in a file of its own or in tokenizer_config.json."""
    if (model / "chat_template.jinja").is_file() or (model / "chat_template.json").is_file():
        return True
    return bool(model_file_if_any(model, "tokenizer_config.json").get("chat_template"))
