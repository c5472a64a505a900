"""`--expect SHA256` of the commands that print a model's digest: what it may be, and how they end."""

from __future__ import annotations

import sys
from pathlib import Path

from facility.exchange.errors import ConfigurationError
from facility.exchange.exit_codes import ExitCode
from facility.exchange.messages.strict_json import HEX


def expected_digest(given: str | None) -> str | None:
    """A digest that `--expect` names; None without one. Raises `ConfigurationError` for what is none: an empty variable
    of a shell, for one, with which every content would pass."""
    if given is None or HEX.fullmatch(given.lower()):
        return given and given.lower()
    raise ConfigurationError(f"--expect is {given!r:.80}, expected a SHA-256 of 64 hexadecimal digits")


def print_digest(model: Path, found: str, expected: str | None) -> int:
    """Print the digest of a model; returns the command's exit code, and says on stderr where another was expected."""
    print(found)
    if expected is None or found == expected:
        return int(ExitCode.OK)
    print(f"{model} is another model, expected {expected}", file=sys.stderr)
    return int(ExitCode.FOUND)
