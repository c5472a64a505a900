"""Validated dataclasses: settings and messages declared once, checked by pydantic wherever they are made.

    @validated(frozen=True, kw_only=True)
    class Example:
        steps: Positive[int] = 100
        \"\"\"What it means, its unit and its off value: this text is the documentation of the key.\"\"\"

Unknown keys are refused. Values are not converted (text is not a number, true is not 1), except whole numbers to
floating-point ones, and text such as `1e-4`, which YAML 1.1 does not read as a number. `__post_init__` is for what
concerns several fields. Every error is a `ConfigurationError` that says what was found and what was expected.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import pydantic.dataclasses
from annotated_types import Ge, Gt, Le
from pydantic import AllowInfNan, BeforeValidator, ConfigDict, Strict, ValidationError

from facility.exchange.errors import ConfigurationError, NewerFormat, UnknownKey
from facility.exchange.field_texts import field_text
from facility.exchange.hints import (
    dataclass_at,
    describe_hint,
    describe_range,
    dotted_key,
    hint_at,
    scalar_kinds,
    type_hints,
)

T = TypeVar("T")
N = TypeVar("N", int, float)
Positive = Annotated[N, Gt(0)]
AtLeastOne = Annotated[N, Ge(1)]
NonNegative = Annotated[N, Ge(0)]
Share = Annotated[float, Gt(0), Le(1)]
"""More than nothing, at most all."""
ShareOrNone = Annotated[float, Ge(0), Le(1)]
"""A share from 0 to 1, both included."""
CONFIG = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
CALLS = ("missing", "unexpected_keyword_argument")
RANGES = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
"""Numbers such as 1e-4, which YAML 1.1 reads as text."""


NUMBER = re.compile(r"[-+]?(0|[1-9]\d*)(\.\d+)?")
SPELLING = 0.8
"""Likeness from which on a key is taken for another one of its section, rather than for one of a section below."""
BOOLEANS = ("true", "false", "yes", "no", "on", "off")


def _float(value: Any) -> Any:
    return float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value


SCALARS: dict[Any, tuple[list[Any], list[Any]]] = {
    str: ([Strict()], []),
    int: ([Strict()], []),
    bool: ([Strict()], []),
    float: ([Strict(), AllowInfNan(False)], [BeforeValidator(_float)]),
}
"""Type -> markers before and after those of the declaration."""

DECLARED: dict[str, list[type]] = {}
"""Validated classes by name."""

if TYPE_CHECKING:
    from dataclasses import dataclass as validated
else:

    def validated(*, frozen: bool, kw_only: bool):
        """Make a class a dataclass whose values are validated on construction; errors are `ConfigurationError`."""

        def declare(cls: type) -> type:
            resolved = typing.get_type_hints(cls, include_extras=True)
            cls.__annotations__ = {name: _strict(resolved[name]) for name in cls.__annotations__}
            made = pydantic.dataclasses.dataclass(cls, frozen=frozen, kw_only=kw_only, config=CONFIG)
            construct = made.__init__

            @functools.wraps(construct)
            def __init__(self: Any, **values: Any) -> None:
                try:
                    construct(self, **values)
                except ValidationError as error:
                    ours = _translated(error, type(self), values, "", None)
                    if any(one["type"] in CALLS and len(one["loc"]) == 1 for one in error.errors()):
                        raise TypeError(str(ours)) from None  # the call is wrong, not a value
                    raise ours from None

            made.__init__ = __init__
            DECLARED.setdefault(made.__name__, []).append(made)
            return made

        return declare


def parse_dataclass(kind: type[T], raw: Any, *, where: str = "", file: Path | str | None = None, update: str = "") -> T:
    """Build validated dataclass `kind` from plain data. `where`: the key that holds `raw`, for errors.

    `update`: of data that CrossFed wrote, what to do where a newer one did, as a key says that is unknown here.

    Raises `ConfigurationError` with file and key; `NewerFormat` for an unknown key where `update` is given.
    """
    assert dataclasses.is_dataclass(kind) and hasattr(kind, "__pydantic_validator__"), f"{kind} is not validated"
    if not isinstance(raw, dict):
        found_there = f"{where} is" if where else "found"
        raise ConfigurationError(f"{found_there} {raw!r:.60}, expected a mapping", file=file, key=where)
    try:
        return kind.__pydantic_validator__.validate_python(raw)  # type: ignore[attr-defined]
    except ValidationError as error:
        found = _translated(error, kind, raw, where, file)
        if update and isinstance(found, UnknownKey):
            key, reason = _printed(found.key or ""), "a newer CrossFed wrote it, if nobody edited it"
            text = f"{key} is a key that is unknown here: {reason}; {update}"
            raise NewerFormat(text, file=file, key=found.key) from None
        raise found from None


def check_format(
    raw: Any, newest: int, *, file: Path | str | None = None, update: str = "update CrossFed here"
) -> None:
    """Raise `ConfigurationError` where the mapping `raw` states a `format` that is not a whole number from 1 to
    `newest`; `NewerFormat`, with the advice `update`, where it is above.

    To be called before the keys are read: a newer format has some that are unknown here. What states no format passes.
    """
    if not isinstance(raw, dict) or "format" not in raw:
        return
    found = raw["format"]
    if type(found) is not int or found < 1:
        raise ConfigurationError(
            f"format is {found!r:.40}, expected a whole number from 1 to {newest}", file=file, key="format"
        )
    if found > newest:
        raise NewerFormat(f"format {found} is newer than {newest}: {update}", file=file, key="format")


def with_settings(entries: list[dict[str, Any]], *kinds: type) -> list[dict[str, Any]]:
    """A registry's descriptions with defaults and texts of the shared settings, which the first of `kinds` declares.

    A key may have its text where it is declared first, in a later one.
    """
    fields = [kind.__pydantic_fields__ for kind in kinds]  # type: ignore[attr-defined]
    for entry in entries:
        for parameter in entry["parameters"]:
            if set(parameter) == {"name"}:
                declared = [found[parameter["name"]] for found in fields if parameter["name"] in found]
                holders = [kind for kind in kinds if parameter["name"] in kind.__pydantic_fields__]  # type: ignore[attr-defined]
                text = next((text for kind in holders if (text := field_text(kind, parameter["name"]))), "")
                parameter |= {"default": declared[0].default, "text": text}
    return entries


ELSEWHERE = {
    "lr": "learning_rate",
    **dict.fromkeys(("dtype", "precision", "mixed_precision", "bf16", "fp16"), "compute_dtype"),
    **dict.fromkeys(("gpus", "num_gpus", "gpus_per_node", "nproc_per_node", "devices"), "ranks"),
    **dict.fromkeys(("epochs", "num_train_epochs", "max_steps", "local_steps"), "steps"),
    **dict.fromkeys(("batch_size", "global_batch_size"), "batch_sequences"),
    "per_device_train_batch_size": "micro_batch_sequences",
    **dict.fromkeys(("max_grad_norm", "gradient_clipping"), "clip_norm"),
    **dict.fromkeys(("port", "hostname"), "host"),
    **dict.fromkeys(("identity_file", "ssh_key"), "key"),
    **dict.fromkeys(("walltime", "time_limit", "gres"), "options"),
    **dict.fromkeys(("account", "partition", "queue", "project", "qos"), "fill"),
    "r": "rank",
}
"""What other tools call our keys."""


def close_to(word: str, known: Sequence[str]) -> str:
    """` did you mean 'x'?`, when one of `known` looks like `word`, or is that in other tools; else nothing."""
    close = [ELSEWHERE[word]] if ELSEWHERE.get(word) in known else difflib.get_close_matches(word, known, 1)
    return f" did you mean {close[0]!r}?" if close else ""


def _strict(hint: Any) -> Any:
    """The hint with every text and number in it strict."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    base, marks = (arguments[0], arguments[1:]) if origin is Annotated else (hint, ())
    if base in SCALARS:
        if any(isinstance(mark, Strict) for mark in marks):
            return hint
        before, after = SCALARS[base]
        return Annotated[tuple([base, *before, *marks, *after])]
    if origin is Annotated:
        return Annotated[tuple([_strict(base), *marks])]
    if origin in (typing.Union, UnionType):
        return typing.Union[tuple(map(_strict, arguments))]  # noqa: UP007 (made at run time)
    if origin in (list, tuple, dict, Mapping, Sequence):
        return origin[tuple(one if one is Ellipsis else _strict(one) for one in arguments)]
    return hint


def _translated(
    error: ValidationError, kind: type, raw: Mapping[Any, Any], where: str, file: Path | str | None
) -> ConfigurationError:
    """The first of pydantic's errors, as ours: unknown keys first, then by place in the file."""
    found = [(_path(one["loc"], raw), one) for one in error.errors(include_url=False)]
    deepest = [
        (path, one)
        for path, one in found
        if one["type"] == "missing"
        or not any(len(other) > len(path) and other[: len(path)] == path for other, _ in found)
    ]
    unknown = [pair for pair in deepest if pair[1]["type"] in ("unexpected_keyword_argument", "invalid_key")]
    path, first = min(unknown or deepest, key=lambda pair: _place(pair[0], raw))
    name, what = dotted_key(path, where), first["type"]
    if unknown:
        return unknown_key(kind, path, where, file)
    if what == "missing":
        absent = [str(one["loc"][-1]) for at, one in deepest if one["type"] == "missing" and at == path]
        return ConfigurationError(f"{_printed(name) or 'the mapping'} lacks {', '.join(absent)}", file=file, key=name)
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, ConfigurationError):
        return _refused(raised, kind, path, where, file)
    hint = hint_at(kind, path)
    expected = (
        str(raised) if raised is not None else _expected(what, first["input"], hint) + _quotes(hint, first["input"])
    )
    return ConfigurationError(f"{_printed(name)} is {as_written(first['input'])}, {expected}", file=file, key=name)


def as_written(value: Any) -> str:
    """A value as its file has it."""
    return "empty" if value is None else str(value).lower() if isinstance(value, bool) else f"{value!r:.60}"


def _quotes(hint: Any, value: Any) -> str:
    """What quotes would change, where text was expected and YAML read something else, or the other way round."""
    kinds = scalar_kinds(hint)
    if str in kinds and isinstance(value, bool):
        return ": put it between quotes, since YAML takes yes, no, on and off for true and false"
    if str in kinds and isinstance(value, int | float):
        return ": put it between quotes"
    if bool in kinds and isinstance(value, str) and value.lower() in BOOLEANS:
        return ": remove the quotes"
    if isinstance(value, str) and NUMBER.fullmatch(value) and kinds & {int, float}:
        return ": remove the quotes"
    return ""


def _expected(what: str, value: Any, hint: Any) -> str:
    """What a value of this hint should have been, after pydantic's error of type `what`."""
    words = describe_range(hint)
    if what in RANGES:
        return f"expected {words}"
    endless = isinstance(value, float) and not math.isfinite(value)
    kinds = "a finite number" if endless else describe_hint(hint)
    return f"expected {kinds}" + (f", {words}" if words and words not in kinds else "")


def unknown_key(kind: type, path: Sequence[Any], where: str, file: Path | str | None) -> ConfigurationError:
    """The error for the key at `path`, which `kind` does not declare: what it may have been meant for."""
    name, key = dotted_key(path, where), str(path[-1])
    holder = dataclass_at(kind, path[:-1])
    known = [field.name for field in dataclasses.fields(holder)] if holder is not None else []  # type: ignore[arg-type]
    sections = {one: dataclass_at(holder, [one]) for one in known} if holder is not None else {}
    below = [
        repr(dotted_key([*path[:-1], one, key], where))
        for one, section in sections.items()
        if section is not None and key in type_hints(section)
    ]
    misspelt = difflib.get_close_matches(key, known, 1, SPELLING)
    meant = f" did you mean {' or '.join(below)}?" if below and not misspelt else close_to(key, known)
    return UnknownKey(f"unknown key {name!r};{meant} known keys are {', '.join(known)}", file=file, key=name)


def _refused(
    error: ConfigurationError, kind: type, path: list[Any], where: str, file: Path | str | None
) -> ConfigurationError:
    """What a dataclass said of its own fields: it names the field, or begins its message with the field's name."""
    place = dotted_key(path, where)
    holder = dataclass_at(kind, path)
    known = [field.name for field in dataclasses.fields(holder)] if holder is not None else []  # type: ignore[arg-type]
    first = error.message.split(maxsplit=1)[0]
    field = error.key or (first if first in known else "")
    key = ".".join(filter(None, [place, field]))
    return ConfigurationError(f"{_printed(place)}: {error.message}" if place else error.message, file=file, key=key)


def _printed(key: str) -> str:
    """A key for a message: settings come from another institution, and its name may hold a line of its own."""
    return key if key.isprintable() else ascii(key)[1:-1]


def _path(loc: Sequence[Any], raw: Any) -> list[Any]:
    """Path of an error in `raw`; pydantic also names the alternatives of unions, which are not keys."""
    path = []
    for step in loc:
        inside = step in raw if isinstance(raw, Mapping) else isinstance(step, int) and step < len(raw)
        if inside:
            path.append(step)
            raw = raw[step]
            if not isinstance(raw, Mapping | list | tuple):
                break
    return path


def _place(path: list[Any], raw: Any) -> tuple[int, ...]:
    """Position in the order of the file."""
    numbers = []
    for step in path:
        numbers.append(list(raw).index(step) if isinstance(raw, Mapping) else step)
        raw = raw[step]
    return tuple(numbers)
