"""Every setting that the schema declares, beyond its bounds, and choices of several settings together: each is refused
in one sentence with its line, or read and rendered."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.config.federation import read_federation
from coordinator.config.schema import schema
from coordinator.engine.render import render
from facility.exchange.errors import ConfigurationError
from tests.cases import slow_but

Key = tuple[str, ...]
BASE: dict[str, Any] = {
    "name": "f",
    "model": "model",
    "rounds": 3,
    "pretrained": False,
    "facilities": [{"name": name, "dataset": "/data"} for name in ("a", "b", "c")],
}
SCHEMA = schema()


def leaves(node: dict[str, Any], key: Key = ()) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Every setting below `node` that is not a section, one entry for each form that it may have."""
    if "$ref" in node:
        node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]
    for one in node.get("anyOf", []):
        yield from leaves(one, key)
    if "properties" in node:
        for name, below in node["properties"].items():
            yield from leaves(below, (*key, name))
    elif "anyOf" not in node:
        yield key, node


def described(changes: dict[Key, Any]) -> dict[str, Any]:
    """The base federation with these values."""
    file = yaml.safe_load(yaml.safe_dump(BASE))
    for key, value in changes.items():
        if key[0] == "rounds" and len(key) > 1 and isinstance(file["rounds"], int):
            file["rounds"] = {"count": file["rounds"]}
        place = file
        for name in key[:-1]:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                return {}
        place[key[-1]] = value
    return file


def choices(node: dict[str, Any]) -> list[Any]:
    """Values that a setting may have, where they are few or at its bounds."""
    if node.get("type") == "boolean":
        return [True, False]
    at_bounds = [node[name] for name in ("minimum", "maximum") if name in node]
    return list(node.get("enum", [])) or ([node["const"]] if "const" in node else at_bounds)


def beyond(node: dict[str, Any]) -> list[Any]:
    """Values that a setting may not have: just beyond its bounds, no numbers, or of another kind."""
    kind, found = node.get("type"), list[Any]()
    if kind in ("integer", "number"):
        step = 1 if kind == "integer" else 1e-9
        found += [node["minimum"] - step] if "minimum" in node else []
        found += [node["maximum"] * (1 + step) + step] if "maximum" in node else []
        found += [node[name] for name in ("exclusiveMinimum", "exclusiveMaximum") if name in node]
        found += [math.nan, math.inf, -math.inf, 10**400, True, [1], {"a": 1}]
    elif kind == "boolean":
        found += [0, 1, "yes", "true", [True]]
    elif "enum" in node:
        found += ["", f"{node['enum'][0]} ", str(node["enum"][-1]).swapcase() + "x", -1, [node["enum"][0]]]
    return found


FORMS: dict[Key, list[dict[str, Any]]] = {}
for one, form in leaves(SCHEMA):
    if one and one[0] != "facilities":
        FORMS.setdefault(one, []).append(form)
CHOICES = {
    key: values for key, forms in FORMS.items() if (values := [value for form in forms for value in choices(form)])
}
BEYOND = [(key, value) for key, forms in FORMS.items() if len(forms) == 1 for value in beyond(forms[0])]


def read(directory: Path, changes: dict[Key, Any]) -> str:
    """Why these values are refused; '' where they are read and rendered. Any other exception is a fault."""
    file = directory / "federation.yml"
    file.write_text(yaml.safe_dump(described(changes), sort_keys=False))
    try:
        render(read_federation(file))
    except ConfigurationError as error:
        said = str(error)
        assert said.startswith(f"{file}:") and "\n" not in said and len(said) < 800 + len(str(file)), said
        return said.removeprefix(f"{file}:")
    return ""


@pytest.mark.parametrize("fifth", slow_but([0], range(5)))
def test_what_is_beyond_a_settings_bounds_is_refused(fifth: int, tmp_path: Path):
    taken = [(".".join(key), value) for key, value in BEYOND[fifth::5] if not read(tmp_path, {key: value})]
    assert not taken


def some(number: int) -> dict[Key, Any]:
    """Choices of two to four settings."""
    chance = random.Random(number)
    return {key: chance.choice(CHOICES[key]) for key in chance.sample(sorted(CHOICES), chance.randint(2, 4))}


@pytest.mark.parametrize("hundred", slow_but([0], range(20)))
def test_settings_together_are_read_or_refused_in_one_sentence(hundred: int, tmp_path: Path):
    read_at_all = sum(not read(tmp_path, some(100 * hundred + number)) for number in range(100))
    assert read_at_all  # else the sentences would all be of one cause
