"""A facility's round without training: it returns the received model, a little changed, and then misbehaves as told.

Its dataset is a directory with `behaviour.json`: {"leaves": {"cwl.output.json": "...", ...}, "python": "..."}. The
files are left in the job's working directory; the Python text runs there, with `update` the path of the finished
update. The update is sound unless the text changes it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from facility.exchange.messages import report as reports
from facility.exchange.messages.manifest import NAME, Manifest, read_manifest, run_of, with_run, write_manifest
from facility.exchange.messages.settings import read_facility_settings


def report_of(federation: str, facility: str, round: int, **changes: object) -> reports.Report:
    """A report that every check accepts."""
    figures: dict = {
        "samples": 1,
        "tokens": 16,
        "steps": 1,
        "loss_received": 2.0,
        "loss_returned": 1.0,
        "perplexity_received": 7.4,
        "perplexity_returned": 2.7,
        "training_loss": 1.5,
    }
    return reports.Report(federation=federation, facility=facility, round=round, **figures | changes)


def make_update(model: Path, out: Path, *, federation: str, facility: str, round: int) -> None:
    """A sound update at `out`: the received model itself."""
    sent = read_manifest(model)
    shutil.copytree(model, out, ignore=shutil.ignore_patterns(NAME))
    reports.write(out, report_of(federation, facility, round))
    update = Manifest(
        kind="update", federation=federation, facility=facility, round=round, base_sha256=sent.content_sha256
    )
    write_manifest(out, update)
    with_run(out, run_of(sent))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--model", "--dataset", "--settings", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--round", type=int, required=True)
    a = parser.parse_args()
    settings = read_facility_settings(a.settings)
    make_update(a.model, a.out, federation=settings.federation, facility=settings.facility, round=a.round)
    behaviour = json.loads((a.dataset / "behaviour.json").read_text())
    for name, text in behaviour.get("leaves", {}).items():
        Path(name).write_text(text)
    if text := behaviour.get("python"):
        exec(text, {"update": a.out.absolute(), "arguments": a, "settings": settings})  # the attack, as a test wrote it
    return 0


if __name__ == "__main__":
    sys.exit(main())
