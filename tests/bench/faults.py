"""Seconds from a cause of failure to the console's sentence: `python -m tests.bench.faults --out FILE`, as JSON.

    python -m tests.bench.faults --out docs/reference/faults.json
    python -m tests.bench.faults --only "^work directory" --out docs/reference/faults.json

Some five minutes on two idle cores; as root, since it mounts small file systems. The file is written after each cause
and keeps the rows of the causes that are not measured. `docs/reference/faults.md` shows it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.engine.causes import ALL, Row, measure, prepare

SHOWN = ("cause", "step", "seconds", "ended", "recovered", "load", "sentence")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to write; default: print")
    parser.add_argument("--only", default="", metavar="PATTERN", help="causes whose name matches")
    arguments = parser.parse_args()
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(Path(folder))
        table = _table(arguments.out, prepared.start_seconds)
        for step, cause in ALL:
            if not re.search(arguments.only, cause.name) or (cause.mounts and os.geteuid()):
                continue
            row = measure(prepared, cause, step)
            problems += [problem] if (problem := row.wrong(prepared.start_seconds)) else []
            _enter(table, row)
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(table, indent=2) + "\n")
    if arguments.out is None:
        print(json.dumps(table, indent=2))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _table(file: Path | None, start_seconds: float) -> dict[str, Any]:
    """The table so far. `start_seconds` is the longest start of all sittings."""
    table = json.loads(file.read_text()) if file is not None and file.exists() else {"start_seconds": None, "rows": []}
    longest = max(start_seconds, table["start_seconds"] or 0.0)
    return {"cores": os.cpu_count(), "start_seconds": longest, "rows": table["rows"]}


def _enter(table: dict[str, Any], row: Row) -> None:
    """Put a cause's row in its place, in the order of the causes."""
    kept = {one["cause"]: one for one in table["rows"]} | {row.cause: {name: getattr(row, name) for name in SHOWN}}
    table["rows"] = [kept[cause.name] for _, cause in ALL if cause.name in kept]


if __name__ == "__main__":
    sys.exit(main())
