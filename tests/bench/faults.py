"""Seconds from a cause of failure to the console's sentence: `python -m tests.bench.faults --out FILE`, as JSON.

    python -m tests.bench.faults --out docs/reference/faults.json

Half an hour on two cores; as root, since it mounts small file systems. `docs/reference/faults.md` shows the file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.engine.causes import measure_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to write; default: print")
    parser.add_argument("--only", default="", metavar="PATTERN", help="causes whose name matches")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = measure_all(Path(folder), arguments.only)
    rows = [
        {"cause": row.cause, "step": row.step, "seconds": row.seconds, "ended": row.ended, "sentence": row.sentence}
        for row in measured.rows
    ]
    text = json.dumps(
        {
            "cores": os.cpu_count(),
            "tasks_per_core": round(measured.load, 1),
            "start_seconds": measured.start_seconds,
            "same_weights": measured.same,
            "rows": rows,
        },
        indent=2,
    )
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text + "\n")
    for problem in measured.wrong():
        print(problem, file=sys.stderr)
    return 1 if measured.wrong() else 0


if __name__ == "__main__":
    sys.exit(main())
