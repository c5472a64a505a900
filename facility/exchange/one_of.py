"""Marks a key that takes a registered name, for its JSON schema and its explanation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic_core import CoreSchema


@dataclass(frozen=True)
class OneOf:
    """One of these names, or the dotted path of a user's own entry."""

    names: tuple[str, ...]
    own: bool = True
    """False: dotted paths are refused."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        if not self.own:
            return {"enum": list(self.names), "type": "string"}
        own = {"type": "string", "pattern": r"^[A-Za-z_][\w.]*[.:][A-Za-z_]\w*$"}
        return {"anyOf": [{"enum": list(self.names)}, own]}


def one_of(names: Iterable[str]) -> OneOf:
    """The mark for a key that takes one of `names`."""
    return OneOf(tuple(names))
