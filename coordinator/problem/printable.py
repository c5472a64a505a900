"""A JSON file that another institution may have made, such as a measured profile, and whose texts a terminal shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from facility.exchange.errors import ConfigurationError
from facility.exchange.json_values import read_values
from facility.exchange.messages.strict_json import clean_text, is_printable, show_unseen


def read_printable(path: Path) -> Any:
    """The value in the file. Raises `ConfigurationError` as `read_values`, and where a text or a key of it holds what
    moves a cursor or is not seen."""
    raw = read_values(path)
    if (
        odd := next((text for text in _texts(raw) if not is_printable(text) or show_unseen(text) != text), None)
    ) is not None:
        raise ConfigurationError(
            f"holds the text {clean_text(odd, 60)!r}, expected printable characters alone", file=path
        )
    return raw


def _texts(value: Any) -> Iterator[str]:
    """Texts and keys, however deep."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            yield from one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
