"""A facility's round without training: the received model comes back as an update, after the seconds its dataset names.

The dataset is a file here: {"seconds": 0.5, "fail_rounds": [1]}; a round to fail is failed once.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

import yaml

from facility.exchange.messages import report as reports
from facility.exchange.messages.manifest import Manifest, read_manifest, run_of, with_run, write_manifest
from facility.exchange.messages.settings import read_facility_settings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--model", "--dataset", "--settings", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--round", type=int, required=True)
    a = parser.parse_args()
    settings, plan = read_facility_settings(a.settings), yaml.safe_load(a.dataset.read_text())
    time.sleep(plan["seconds"])
    sent = read_manifest(a.model)
    assert (sent.round, sent.facility) == (a.round, settings.facility), (sent, a.round)
    failed = a.dataset.with_name(f"failed-{a.round}")
    if a.round in plan.get("fail_rounds", []) and not failed.exists():
        failed.touch()
        a.out.mkdir()
        reports.write(a.out, reports.Failure(facility=settings.facility, round=a.round, reason="the node burnt down"))
        return 7
    shutil.copytree(a.model, a.out, ignore=shutil.ignore_patterns("manifest.json"))
    report = reports.Report(
        federation=settings.federation,
        facility=settings.facility,
        round=a.round,
        samples=1,
        tokens=16,
        steps=1,
        loss_received=1.0,
        loss_returned=1.0,
        perplexity_received=1.0,
        perplexity_returned=1.0,
        training_loss=1.0,
    )
    reports.write(a.out, report)
    update = Manifest(
        kind="update",
        federation=settings.federation,
        facility=settings.facility,
        round=a.round,
        base_sha256=sent.content_sha256,
    )
    write_manifest(a.out, update)
    with_run(a.out, run_of(sent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
