"""A JSON file of a person or a library, as plain values: problems, profiles, settings, descriptions of federations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from facility.exchange.errors import ConfigurationError
from facility.exchange.files.bounded import read_bounded
from facility.exchange.json_text import MOST_BYTES, parse_values


def read_values(path: Path, *, most_bytes: int = MOST_BYTES) -> Any:
    """The value in the file. Raises `ConfigurationError`, which quotes nothing of a file that is not JSON."""
    try:
        return parse_values(read_bounded(path, most_bytes).decode())
    except OSError as error:
        raise ConfigurationError(f"cannot be read: {error.strerror}", file=path) from None
    except UnicodeDecodeError:
        raise ConfigurationError("cannot be read as JSON: it is not UTF-8", file=path) from None
    except ValueError as error:
        raise ConfigurationError(f"cannot be read as JSON: {error}", file=path) from None
