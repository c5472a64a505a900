"""What a person's JSON file holds, as plain values: problems, profiles, descriptions of federations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from facility.exchange.errors import ConfigurationError


def read_values(path: Path) -> Any:
    """The value in the file. Raises `ConfigurationError` for one that cannot be read, is no JSON, or is nested without
    end."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot be read: {error.strerror}", file=path) from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"cannot be read as JSON: {error}", file=path) from None
