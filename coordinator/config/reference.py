"""Every key of federation.yml as data, from the one declaration: for `crossfed explain` and the documentation.

python -m coordinator.config.reference --out DIR      one Markdown page per section
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from coordinator.config.closing import Rounds
from coordinator.config.federation import FederationFile
from facility.exchange.errors import InputError
from facility.exchange.field_texts import field_text
from facility.exchange.files.durable import write_text
from facility.exchange.hints import dataclass_at, describe_hint, describe_range, field_default, type_hints
from facility.exchange.text import KINDS
from facility.exchange.validation import close_to

SECTIONS = {
    "federation": "The top level of federation.yml.",
    "training": "What a facility does in a round. Under `training:` for all, under `facilities[].training` for one.",
    "aggregation": "How the updates of a round become the next model.",
    "facilities": "Who takes part, and how each facility is reached.",
    "sending": "How models travel to the facilities.",
    "claims": "The largest weight that an update may claim.",
    "stop": "When a federation ends before its last round.",
    "notify": "Whom to notify when operator action is needed or a federation has ended.",
    "evaluation": "Tasks of lm-eval, run on the global model in the facilities' own jobs.",
    "creators": "Who is to be cited when the model is published.",
}
"""Page -> what it is about."""
UNITS = {
    "seconds": "seconds",
    "minutes": "minutes",
    "bytes": "bytes",
    "gb": "GB (10^9 bytes)",
    "flops": "operations per second",
    "steps": "optimizer steps",
    "sequences": "sequences",
    "tokens": "tokens",
    "rounds": "rounds",
}
"""Last word of a key -> unit."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of federation.yml."""

    path: str
    """As in errors: `training.sync.policy`, `facilities[].name`."""
    type: str
    """What it allows, in words."""
    default: str
    """As it would be written; empty for a required key."""
    required: bool
    section: bool
    """True for a mapping with keys of its own."""
    range: str
    unit: str
    text: str
    """The declaration's documentation, on one line."""


MAPPINGS = {"rounds": Rounds}
"""Keys that are a plain value or a mapping."""


def keys(kind: type = FederationFile, above: str = "") -> Iterator[Key]:
    """Every key below a dataclass, sections before what they hold."""
    for field in dataclasses.fields(kind):
        hint = type_hints(kind)[field.name]
        path = f"{above}.{field.name}" if above else field.name
        repeated = _items(hint)
        below = dataclass_at(kind, [field.name, 0] if repeated else [field.name])
        yield _key(kind, field, hint, path, section=below is not None)
        if below is not None and path != "facilities[].training":  # the same keys as training
            yield from keys(below, f"{path}[]" if repeated else path)
        if path in MAPPINGS:
            yield from keys(MAPPINGS[path], path)


def find(path: str) -> Key:
    """The key of this name; a facility's own training is found under `training`.

    Raises `InputError`, naming keys that look like it.
    """
    known = {_plain(key.path): key for key in keys()}
    wanted = re.sub(r"^facilities\.training\.", "training.", _plain(path))
    if wanted in known:
        return known[wanted]
    last = wanted.rpartition(".")[2]
    named = [name for name in known if name.rpartition(".")[2] == last]
    hint = f" did you mean {', '.join(named)}?" if named else close_to(wanted, list(known))
    raise InputError(f"unknown key {path!r};{hint} `crossfed explain` lists all keys")


def explain_key(path: str) -> str:
    """Type, range, unit, default and meaning of one key, and the keys that it holds."""
    key = find(path)
    facts = [("type", key.type), ("range", key.range), ("unit", key.unit), ("default", key.default or "none: required")]
    lines = [key.path, *(f"  {name + ':':9}{value}" for name, value in facts if value)]
    lines += [f"  {key.text}"] if key.text else []
    held = [one for one in keys() if re.fullmatch(re.escape(key.path) + r"(\[\])?\.\w+", one.path)]
    return "\n".join(lines + (["  holds:", *(f"    {_short(one)}" for one in held)] if held else []))


def key_tree() -> str:
    """All keys, indented below their sections, with type and default."""
    lines = []
    for key in keys():
        depth = key.path.count(".")
        lines.append("  " * depth + _short(key))
    return "\n".join(lines)


def section_pages() -> dict[str, str]:
    """Markdown of every page, by the name of its section."""
    rows: dict[str, list[Key]] = {name: [] for name in SECTIONS}
    for key in keys():
        first = re.split(r"[.\[]", key.path)[0]
        rows[first if first in rows and (not key.section or "." in key.path) else "federation"].append(key)
    return {name: _page(name, found) for name, found in rows.items()}


def _page(name: str, found: list[Key]) -> str:
    lines = [f"## {name}", "", SECTIONS[name], ""]
    for key in found:
        facts = [key.type, key.range, key.unit, f"default `{key.default}`" if not key.required else "required"]
        lines += [f"### `{key.path}`", "", f"*{'; '.join(filter(None, facts))}*", ""]
        lines += [_escaped(key.text), ""] if key.text else []
    return "\n".join(lines)


def _key(kind: type, field: dataclasses.Field[Any], hint: Any, path: str, *, section: bool) -> Key:
    required = field.default is field.default_factory is dataclasses.MISSING
    words = describe_hint(hint)
    unit = UNITS.get(field.name.rpartition("_")[2], "") if words in (KINDS[int], KINDS[float]) else ""
    return Key(
        path=path,
        type=words + (" or absent" if NoneType in typing.get_args(hint) else ""),
        default="" if required else _default(field),
        required=required,
        section=section,
        range=describe_range(hint),
        unit=unit,
        text=_documentation(kind, field.name),
    )


def _default(field: dataclasses.Field[Any]) -> str:
    """As YAML: `1e-4` for a small number, `[]` for nothing, `{}` for a section with its own defaults."""
    value = field_default(field)
    if value is None:
        return "absent"
    return "{}" if dataclasses.is_dataclass(value) else json.dumps(value)


def _documentation(kind: type, name: str) -> str:
    """Text under the field, in the class or in the one that it extends."""
    return " ".join(field_text(kind, name).split())


def _items(hint: Any) -> bool:
    return typing.get_origin(hint) in (list, tuple)


def _plain(path: str) -> str:
    return re.sub(r"\[\d*\]", "", path.strip())


def _short(key: Key) -> str:
    name = key.path.rpartition(".")[2]
    if key.section:
        return f"{name}:"
    return f"{name}: {key.type}" + (f" = {key.default}" if not key.required else " (required)")


def _escaped(text: str) -> str:
    """Markdown in which names such as `<name>` and `*.layers.*` stay as they are."""
    parts = text.split("`")
    return "`".join(p if n % 2 else re.sub(r"([<>*_])", r"\\\1", p) for n, p in enumerate(parts))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m coordinator.config.reference", description="Write reference pages."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the Markdown pages")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, text in section_pages().items():
        write_text(out / f"{name}.md", text)


if __name__ == "__main__":
    main()
