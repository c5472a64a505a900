"""Text of a file that a person wrote and saved by an editor of any system: bounded, and UTF-8 without a mark."""

from __future__ import annotations

from pathlib import Path

from facility.exchange.errors import ConfigurationError
from facility.exchange.files.bounded import read_bounded

MARKS = {
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"\xef\xbb\xbf": "UTF-8 with a byte order mark",
}


def typed_text(path: Path, most_bytes: int) -> str:
    """The text, with its line ends as they are.

    Raises `OSError` where the file cannot be read (`read_bounded`), `ConfigurationError` where it holds no plain text.
    """
    content = read_bounded(path, most_bytes)
    for mark, name in MARKS.items():
        if content.startswith(mark):
            raise ConfigurationError(f"is {name}, expected plain UTF-8: save it so", file=path)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"is not UTF-8 text: {error}; save it as UTF-8", file=path) from None
