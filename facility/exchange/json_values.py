"""A JSON file as plain values: of our own, or of a person or a library (problems, profiles, settings).

Messages between institutions are read by `facility.exchange.messages.strict_json`, which also bounds what they hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from facility.exchange.errors import ConfigurationError
from facility.exchange.files.bounded import read_bounded
from facility.exchange.json_text import parse_values

MOST_BYTES = 256 << 20
"""Of a file, unless its reader expects less."""


def values_in(path: Path, *, most_bytes: int = MOST_BYTES) -> Any:
    """The value in a file of our own. Raises `OSError` where it cannot be read, `ValueError` where it is not JSON."""
    return parse_values(read_bounded(path, most_bytes).decode())


def note_in(path: Path) -> Any:
    """The value in a file of our own that a reader can do without; None where it is missing, or damaged."""
    try:
        return values_in(path)
    except (OSError, ValueError):
        return None


def read_values(path: Path, *, most_bytes: int = MOST_BYTES) -> Any:
    """The value in the file. Raises `ConfigurationError`, which quotes nothing of a file that is not JSON."""
    try:
        return values_in(path, most_bytes=most_bytes)
    except OSError as error:
        raise ConfigurationError(f"cannot be read: {error.strerror}", file=path) from None
    except UnicodeDecodeError:
        raise ConfigurationError("cannot be read as JSON: it is not UTF-8", file=path) from None
    except ValueError as error:
        raise ConfigurationError(f"cannot be read as JSON: {error}", file=path) from None
