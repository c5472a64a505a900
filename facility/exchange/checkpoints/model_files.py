"""The JSON files of a Hugging Face model, such as config.json: read by one function, whoever published them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from facility.exchange.errors import CheckpointError
from facility.exchange.json_values import parse_values

CONFIG = "config.json"
MOST_BYTES = 8 << 20
"""Of such a file. A tokenizer.json may be larger."""


def read_model_file(directory: Path, name: str = CONFIG) -> dict[str, Any]:
    """The object in config.json, or in another such file of the model. Raises `CheckpointError`.

    A number may be infinite: transformers writes such (`time_step_limit` of Mamba 2). Whoever takes one checks it.
    """
    file = Path(directory) / name
    try:
        with open(file, "rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        found = parse_values(content.decode())
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}, expected an object")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; copy it again from where the model came from") from None
    return found


def stated(directory: Path, name: str = CONFIG) -> dict[str, Any]:
    """The same; {} where the file is missing or cannot be read, for questions that have an answer without it."""
    try:
        return read_model_file(directory, name)
    except CheckpointError:
        return {}
