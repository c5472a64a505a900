"""Prompt templates: what surrounds each text, for instance "Scrivi un documento: {text}{eos}".

The names are {text}, {bos} and {eos} ({eos} means the separator token for tokenizers that have no other end). Special
tokens come only from the template: text that happens to spell one is encoded as ordinary text.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

from facility.dataset import DatasetError

NAMES = ("text", "bos", "eos")


@dataclass(frozen=True)
class Special:
    """A special token, by name (`bos` or `eos`)."""

    name: str


Piece = str | Special


@dataclass(frozen=True, kw_only=True)
class Template:
    """A template cut at its special tokens; in the strings the text's place is marked by None."""

    source: str
    pieces: tuple[Special | tuple[str | None, ...], ...]

    @property
    def specials(self) -> tuple[str, ...]:
        return tuple(sorted({piece.name for piece in self.pieces if isinstance(piece, Special)}))

    def fill(self, text: str) -> list[Piece]:
        """The template around one text: ordinary strings and special tokens, in order."""
        return [
            piece if isinstance(piece, Special) else "".join(text if part is None else part for part in piece)
            for piece in self.pieces
        ]


def parse_template(source: str) -> Template:
    """Read a template; `{{` and `}}` stand for braces. Raises `DatasetError` for any name other than the three."""
    known = ", ".join(f"{{{name}}}" for name in NAMES)
    pieces: list[Special | tuple[str | None, ...]] = []
    current: list[str | None] = []
    texts = 0
    try:
        parsed = list(string.Formatter().parse(source))
    except ValueError as error:
        raise DatasetError(f"template {source!r}: {error}; known names are {known}, and {{{{ for a brace") from None
    for literal, name, specification, conversion in parsed:
        if literal:
            current.append(literal)
        if name is None:
            continue
        if name not in NAMES or specification or conversion:
            raise DatasetError(f"template {source!r} uses {{{name}}}; known names are {known}")
        if name == "text":
            texts += 1
            current.append(None)
            continue
        if current:
            pieces.append(tuple(current))
            current = []
        pieces.append(Special(name))
    if current:
        pieces.append(tuple(current))
    if texts != 1:
        raise DatasetError(f"template {source!r} holds {{text}} {texts} times, expected once")
    return Template(source=source, pieces=tuple(pieces))
