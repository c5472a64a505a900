"""A JSON file of a person or a library, as plain values: problems, profiles, settings, descriptions of federations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from facility.exchange.errors import ConfigurationError
from facility.exchange.json_text import parse_values


def read_values(path: Path, *, most_bytes: int | None = None) -> Any:
    """The value in the file. Raises `ConfigurationError`, which quotes nothing of a file that is not JSON."""
    try:
        with open(path, "rb") as file:
            content = file.read(-1 if most_bytes is None else most_bytes + 1)
        if most_bytes is not None and len(content) > most_bytes:
            raise ValueError(f"it is larger than {most_bytes} bytes")
        return parse_values(content.decode())
    except OSError as error:
        raise ConfigurationError(f"cannot be read: {error.strerror}", file=path) from None
    except UnicodeDecodeError:
        raise ConfigurationError("cannot be read as JSON: it is not UTF-8", file=path) from None
    except ValueError as error:
        raise ConfigurationError(f"cannot be read as JSON: {error}", file=path) from None
