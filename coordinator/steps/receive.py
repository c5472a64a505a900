"""`python -m coordinator.steps.receive`: verify one facility's update as soon as it has arrived."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from coordinator.aggregation.verify import check_files, check_update
from coordinator.config.aggregation import AggregationSettings
from coordinator.config.settings import read_coordinator_settings
from coordinator.steps.weight_limit import Allowance, allowance_of
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.delta import ENCODINGS, decode
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.errors import InputError, UpdateRefused, exit_on_error
from facility.exchange.files.durable import new_directory
from facility.exchange.files.links import link_tree
from facility.exchange.files.paths import resolve
from facility.exchange.messages import report
from facility.exchange.messages.manifest import read_manifest, verify_manifest
from facility.exchange.messages.signatures import verify


def receive(
    *,
    update: Path | None,
    facility: str,
    round: int,
    model: Path,
    evaluation: bool,
    settings: AggregationSettings,
    decoded: Path | None = None,
    allowance: Allowance | None = None,
) -> report.Failure | None:
    """None when `update` may take part in the round, else why not. Raises only for our own model's faults.

    An update that travelled as a difference becomes a whole one at `decoded`. One whose report claims more than
    `allowance` is refused.
    """
    if update is None:
        reason = "left no update: its job was cancelled, ran out of time, or lost its node"
        return report.Failure(facility=facility, round=round, reason=reason, kind="absent")
    try:
        if (told := report.read_failure(update)) is not None:
            return told
        if settings.allowed_signers:
            verify(update, facility, resolve(settings.allowed_signers))
        if evaluation:
            verify_manifest(update)
            return None
        check_files(update, facility)
        if read_manifest(update).encoding in ENCODINGS:
            assert decoded is not None, "an encoded update needs a place to be decoded at"
            decode(update, reference=model, out=decoded)
            update = decoded
        check_update(
            update,
            base=open_checkpoint(model),
            base_manifest=read_manifest(model),
            facility=facility,
            round=round,
            maximum_staleness=settings.maximum_staleness,
            patterns=Patterns(tuple(settings.include), tuple(settings.exclude)),
        )
        if allowance is not None and (reason := allowance.excess(report.read_report(update))):
            raise UpdateRefused(facility, reason)
    except (UpdateRefused, InputError) as error:
        return report.Failure(facility=facility, round=round, reason=str(error), kind="refused")
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m coordinator.steps.receive", description=__doc__)
    parser.add_argument(
        "--federation", type=Path, required=True, help="coordinator.json, rendered by `crossfed render`"
    )
    parser.add_argument("--model", type=Path, required=True, help="global model that the round started from")
    parser.add_argument("--round", type=int, required=True, help="number of the round, from 0")
    parser.add_argument("--facility", required=True, help="name of the facility the update must come from")
    parser.add_argument("--update", type=Path, help="the update's directory; leave out when the facility left none")
    parser.add_argument(
        "--out", type=Path, required=True, help="directory to make: the sound update, or failure.json alone"
    )
    arguments = parser.parse_args()
    settings = read_coordinator_settings(arguments.federation)
    decoded = arguments.out.with_name(f".{arguments.out.name}.decoded")
    shutil.rmtree(decoded, ignore_errors=True)
    refuses = settings.claims.action == "refuse"
    failure = receive(
        update=arguments.update,
        facility=arguments.facility,
        round=arguments.round,
        model=arguments.model,
        evaluation=arguments.round >= settings.rounds,
        settings=settings.aggregation,
        decoded=decoded,
        allowance=allowance_of(settings, arguments.facility, arguments.model) if refuses else None,
    )
    if failure is None:
        link_tree(decoded if decoded.exists() else arguments.update, arguments.out)
        shutil.rmtree(decoded, ignore_errors=True)
        print(f"update of {arguments.facility} for round {arguments.round} is sound")
        return 0
    shutil.rmtree(decoded, ignore_errors=True)
    with new_directory(arguments.out) as temporary:
        report.write(temporary, failure)
    print(f"round {arguments.round} goes on without {arguments.facility}: {failure.reason}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
