"""Writing a report in one of its formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coordinator.report.markdown import markdown
from coordinator.report.page import page
from facility.exchange.files.durable import write_text

FORMATS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "html": page,
    "md": markdown,
    "json": lambda data: json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
}


def write_report(data: Mapping[str, Any], path: Path, format: str = "html") -> Path:
    """Write `coordinator.report.data.gather`'s data; returns `path`."""
    write_text(path, FORMATS[format](data))
    return path
