"""`federation.schema.json`: the keys of federation.yml for editors, from the one declaration.

An editor with a YAML language server completes and checks a file that begins with `FIRST_LINE`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from coordinator.config.federation import FederationFile
from facility.exchange.field_texts import field_text
from facility.exchange.files.durable import write_text
from facility.exchange.validation import DECLARED

NAME = "federation.schema.json"
FIRST_LINE = f"# yaml-language-server: $schema={NAME}\n"


def schema() -> dict[str, Any]:
    """JSON Schema of federation.yml."""
    made = TypeAdapter(FederationFile).json_schema()
    for name, described in {FederationFile.__name__: made, **made["$defs"]}.items():
        for kind in DECLARED.get(name, []):
            _add_texts(described, kind)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made, "title": "federation.yml"}


def _add_texts(described: dict[str, Any], kind: type) -> None:
    """Give every key the text under its field."""
    keys = described.get("properties", {})
    if not keys.keys() == {field.name for field in dataclasses.fields(kind)}:
        return  # another class of the same name
    for key, about in keys.items():
        if text := field_text(kind, key):
            keys[key] = dict(sorted((about | {"description": text}).items()))


def schema_text() -> str:
    """The file as it is shipped."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def write_schema(file: Path) -> None:
    """Write the schema to `file`."""
    write_text(file, schema_text())
