"""The JSON files of a Hugging Face model, such as config.json: read by one function, whoever published them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from facility.exchange.errors import CheckpointError, ConfigurationError
from facility.exchange.json_values import read_values

CONFIG = "config.json"
MOST_BYTES = 8 << 20
"""Of such a file. A tokenizer.json may be larger."""


def read_model_file(directory: Path, name: str = CONFIG) -> dict[str, Any]:
    """The object in config.json, or in another such file of the model. Raises `CheckpointError`.

    A number may be infinite: transformers writes such (`time_step_limit` of Mamba 2). Whoever takes one checks it.
    """
    file = Path(directory) / name
    try:
        found = read_values(file, most_bytes=MOST_BYTES)
    except ConfigurationError as error:
        raise CheckpointError(f"{file} {error.message}; copy it again from where the model came from") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds a {type(found).__name__}, expected an object; copy it again")
    return found


def model_file_if_any(directory: Path, name: str = CONFIG) -> dict[str, Any]:
    """As `read_model_file`; {} where the file is missing or cannot be read, for questions with an answer without it."""
    try:
        return read_model_file(directory, name)
    except CheckpointError:
        return {}
