"""Type hints of validated dataclasses: the hint of a key such as `training.steps`, and what it allows in words."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator
from pydantic_core import PydanticUndefined

from facility.exchange.one_of import OneOf
from facility.exchange.text import KINDS

Path = Sequence[str | int]
"""A key as its parts: `facilities[0].training` is ("facilities", 0, "training")."""


@functools.cache
def type_hints(kind: type) -> Mapping[str, Any]:
    """Resolved type hint of every field of a dataclass, constraints included."""
    resolved = typing.get_type_hints(kind, include_extras=True)
    return {field.name: resolved[field.name] for field in dataclasses.fields(kind)}


def hint_at(kind: type, path: Path) -> Any:
    """Type hint of the value at `path` below dataclass `kind`; None where the declaration has no such key."""
    candidates: list[Any] = [kind]
    for step in path:
        candidates = [below for hint in candidates for below in _below(hint, step)]
    return typing.Union[tuple(candidates)] if candidates else None  # noqa: UP007 (made at run time)


def dataclass_at(kind: type, path: Path) -> type | None:
    """The dataclass that describes the mapping at `path`, if one does."""
    hint = hint_at(kind, path)
    return next((plain for plain in map(_plain, _alternatives(hint)) if dataclasses.is_dataclass(plain)), None)  # type: ignore[return-value, arg-type]


def keys_of(kind: type, above: Path = ()) -> Iterator[str]:
    """Every key below a dataclass as errors name it, such as `training.sync.policy`, sections before what they hold."""
    for name in type_hints(kind):
        path = (*above, name)
        yield dotted_key(path)
        if (below := dataclass_at(kind, [name])) is not None:
            yield from keys_of(below, path)


def field_default(field: dataclasses.Field[Any]) -> Any:
    """The default of a field, made anew; `dataclasses.MISSING` where it has none."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def dotted_key(path: Path, where: str = "") -> str:
    """`facilities[0].training.steps`, below `where`."""
    text = where
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def describe_hint(hint: Any) -> str:
    """What a hint allows, in words: `text`, `one of 'a', 'b'`, `a list`, `'all' or a whole number (1 or more)`."""
    alternatives = _written(hint)
    words = [_allowed(one) for one in alternatives]
    if len(words) > 1:
        ranges = [describe_range(one) for one in alternatives]
        words = [f"{word} ({range})" if range else word for word, range in zip(words, ranges, strict=True)]
    return " or ".join(dict.fromkeys(words))


def scalar_kinds(hint: Any) -> set[Any]:
    """Which of text, whole number, number, true and false (`KINDS`) a hint allows."""
    return {_plain(one) for one in _written(hint)} & KINDS.keys()


def describe_range(hint: Any) -> str:
    """The range of a number in words: `1 or more`, `more than 0 and at most 1`; empty without one, or for a union."""
    alternatives = list(_alternatives(hint))
    marks = [] if len(alternatives) > 1 else _marks(hint)
    words = []
    for mark in marks:
        match mark:
            case Gt():
                words.append(f"more than {mark.gt}")
            case Ge():
                words.append(f"{mark.ge} or more")
            case Lt():
                words.append(f"less than {mark.lt}")
            case Le():
                words.append(f"at most {mark.le}")
    return " and ".join(words)


def _written(hint: Any) -> list[Any]:
    """The alternatives of what may be written, such as `true` for a mapping's defaults: more than what is kept."""
    for mark in _marks(hint):
        if isinstance(mark, BeforeValidator) and mark.json_schema_input_type is not PydanticUndefined:
            return _written(mark.json_schema_input_type)
    return [one for one in _alternatives(hint) if one is not NoneType]


def _allowed(hint: Any) -> str:
    plain = _plain(hint)
    for mark in _marks(hint):
        if isinstance(mark, OneOf):
            return f"one of {', '.join(map(repr, mark.names))}" + (", or a dotted path" if mark.own else "")
    origin, arguments = typing.get_origin(plain), typing.get_args(plain)
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(repr, arguments))
    if dataclasses.is_dataclass(plain) or (origin or plain) in (dict, Mapping):
        return "a mapping"
    if (origin or plain) in (list, tuple):
        return "a list"
    return KINDS[plain] if plain in KINDS else getattr(plain, "__name__", str(plain))


def _below(hint: Any, step: str | int) -> Iterator[Any]:
    """Hints of the value under key (or at index) `step` of a value with this hint."""
    for one in _alternatives(hint):
        plain = _plain(one)
        origin, arguments = typing.get_origin(plain), typing.get_args(plain)
        if dataclasses.is_dataclass(plain):
            if step in (known := type_hints(plain)):  # type: ignore[arg-type]
                yield known[step]  # type: ignore[index]
        elif origin in (list, tuple) and isinstance(step, int) and arguments:
            repeated = origin is list or arguments[-1] is Ellipsis
            yield arguments[0 if repeated else min(step, len(arguments) - 1)]
        elif origin in (dict, Mapping):
            yield arguments[1]


def _alternatives(hint: Any) -> Iterator[Any]:
    """The members of a union, or the hint itself."""
    plain = _plain(hint)
    if typing.get_origin(plain) in (typing.Union, UnionType):
        for one in typing.get_args(plain):
            yield from _alternatives(one)
    else:
        yield hint


def _plain(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def _marks(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
