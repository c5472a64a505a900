"""JSON of a person or a library, as plain values: problems, profiles, descriptions of federations, models' files.

Messages between institutions are read by `facility.exchange.messages.strict_json`, which bounds what it accepts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from facility.exchange.errors import ConfigurationError


def parse_values(text: str | bytes) -> Any:
    """As `json.loads`, whose `RecursionError` for deep nesting is a `ValueError` here, like every other refusal."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists or mappings are nested too deep") from None


def read_values(path: Path) -> Any:
    """The value in the file. Raises `ConfigurationError`, which quotes nothing of a file that is not JSON."""
    try:
        return parse_values(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot be read: {error.strerror}", file=path) from None
    except UnicodeDecodeError:
        raise ConfigurationError("cannot be read as JSON: it is not UTF-8", file=path) from None
    except ValueError as error:
        raise ConfigurationError(f"cannot be read as JSON: {error}", file=path) from None
