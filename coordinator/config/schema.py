"""`federation.schema.json`: the keys of federation.yml for editors, from the one declaration.

An editor with a YAML language server completes and checks a file that begins with `FIRST_LINE`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from coordinator.config.federation import FederationFile
from facility.exchange.files.durable import write_text

NAME = "federation.schema.json"
FIRST_LINE = f"# yaml-language-server: $schema={NAME}\n"


def schema() -> dict[str, Any]:
    """JSON Schema of federation.yml."""
    made = TypeAdapter(FederationFile).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made, "title": "federation.yml"}


def schema_text() -> str:
    """The file as it is shipped."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def write_schema(file: Path) -> None:
    """Write the schema to `file`."""
    write_text(file, schema_text())
