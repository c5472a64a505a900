"""`python -m coordinator.steps.receive`: verify one facility's update as soon as it has arrived."""

from __future__ import annotations

import logging
import shutil
import sys
import traceback
from pathlib import Path
from typing import Literal

from coordinator.aggregation.first_adapters import started_from
from coordinator.aggregation.plan import norms_suffice
from coordinator.aggregation.rebase import rebase
from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.verify import check_files, check_identity, check_update
from coordinator.archive.audit import log_entry
from coordinator.archive.rounds import CARRIED, Archive
from coordinator.config.settings import CoordinatorSettings, read_coordinator_settings
from coordinator.events.event import emit
from coordinator.rounds.late import read_late
from coordinator.rounds.lost import read_lost
from coordinator.rounds.verification import averaged_as_encoded, verified_as_averaged
from coordinator.rounds.weight_limit import weight_limit_of
from coordinator.steps.answers import (
    check_answer,
    check_evaluation,
    check_masked,
    check_no_weights,
    check_report,
    check_run,
)
from coordinator.steps.expectation import Earlier, Expected, Sent
from coordinator.steps.options import step_parser
from facility.exchange.checkpoints.delta import decode_update
from facility.exchange.delta_codecs import CODECS
from facility.exchange.errors import CrossFedError, InputError, UpdateRefused, exit_on_error
from facility.exchange.files.audit_log import HEAD
from facility.exchange.files.durable import new_directory
from facility.exchange.files.links import link_tree
from facility.exchange.files.paths import resolve_path
from facility.exchange.files.storage import refuses_writes
from facility.exchange.files.sweep import remove_transferred
from facility.exchange.messages import report
from facility.exchange.messages.manifest import (
    NAME,
    Manifest,
    manifest_if_any,
    read_manifest,
    sha256_of,
    verify_manifest,
)
from facility.exchange.messages.masking import ENCODING, due_after
from facility.exchange.messages.signatures import verify_signature
from facility.exchange.messages.strict_json import clean_text

log = logging.getLogger("coordinator.steps.receive")

LOG_LINES, LOG_COLUMNS = 40, 400
"""What is kept of a failed job's log."""


def receive(
    update: Path | None, expected: Expected, *, decoded: Path | None = None, late: str = "", lost: str = ""
) -> report.Failure | None:
    """None when `update` may take part in the round, else why not.

    Raises only for faults of our own model, and `OSError` where this machine's file system takes no more.

    An update that travelled as a difference becomes a whole one at `decoded`, unless it is averaged from its message
    (`Expected.encoded`); a late one, of an earlier round, becomes there what it would be had it started from the model
    of this round. `late`: why a facility that the round did not wait for left nothing; `lost`: why its job was taken
    for lost. Whatever an update holds, the failure names the expected facility and round.
    """
    if update is None:
        left_nothing = "left no update: its job was not taken, was cancelled, ran out of time, or lost its node"
        return _failed(expected, late or lost or left_nothing, kind="late" if late else "absent")
    sent = expected.sent()
    try:
        return _received(update, sent, expected, decoded)
    except (UpdateRefused, InputError) as error:
        return _failed(expected, clean_text(str(error)))
    except Exception as error:  # whatever an update does to our code makes its own facility absent, and no other
        if refuses_writes(error):
            raise
        place = "".join(traceback.format_tb(error.__traceback__))  # not its words, which an update may choose
        log.warning("the update of %s for round %d cannot be read at\n%s", expected.facility, expected.round, place)
        return _failed(expected, f"its update cannot be read: {type(error).__name__}: {clean_text(str(error), 200)}")


def _failed(expected: Expected, reason: str, kind: Literal["refused", "absent", "late"] = "refused") -> report.Failure:
    return report.Failure(facility=expected.facility, round=expected.round, reason=reason, kind=kind)


def _received(update: Path, sent: Sent, expected: Expected, decoded: Path | None) -> report.Failure | None:
    """The failure that the facility itself states; None for a sound update. Raises `InputError` for any other."""
    facility, signers = expected.facility, expected.settings.allowed_signers
    check_files(update, facility)
    if signers:
        check_signature(update, facility, signers)
    if (failure := report.read_failure(update)) is not None:
        return _failure(update, failure, sent, expected)
    if not expected.evaluation:
        check_training(update, sent, expected, decoded)
        return None
    check_evaluation(update, sent, expected)
    if expected.masks is not None:
        check_no_weights(update, facility)
    if sent.manifest.kind != "model":
        check_answer(update, sent, expected)
    return None


def check_training(update: Path, sent: Sent, expected: Expected, decoded: Path | None) -> None:
    """Raise `UpdateRefused`, or another `InputError`, unless the update may be averaged."""
    facility, settings, masks = expected.facility, expected.settings, expected.masks
    manifest = read_manifest(update)
    check_run(manifest, sent, facility)
    oldest = settings.maximum_staleness if expected.earlier is not None else 0  # without its model none can be used
    check_identity(manifest, None, facility, expected.round, maximum_staleness=oldest)
    started = sent.directory
    if manifest.round < expected.round:
        assert expected.earlier is not None and decoded is not None, "a late update needs the archive and a place"
        started = expected.earlier.started(manifest)
    if manifest.encoding in CODECS.names() and not (expected.encoded and started == sent.directory):
        assert decoded is not None, "an encoded update needs a place to be decoded at"
        norms = norms_suffice(settings, settings.screen.minimum_updates)
        decode_update(update, reference=started, out=decoded, norms=norms)
        update = decoded
    if (masks is not None) != (manifest.encoding == ENCODING):
        raise UpdateRefused(
            facility, f"its encoding is {manifest.encoding!r}, expected {'masked' if masks else 'an update'} as agreed"
        )
    if masks is not None:
        check_masked(update, manifest, sent, expected)
        return
    check_update(
        update,
        base=sent.checkpoint,
        base_manifest=sent.manifest,
        facility=facility,
        round=expected.round,
        maximum_staleness=settings.maximum_staleness,
        patterns=expected.patterns,
        adapters=expected.adapters,
        content=expected.content or started != sent.directory,
    )
    claimed = report.read_report(update)
    check_report(claimed, sent, facility)
    if expected.weight_limit is not None and (reason := expected.weight_limit.excess(claimed)):
        raise UpdateRefused(facility, reason)
    if started != sent.directory:
        assert decoded is not None
        _move(update, started, sent, expected, decoded)


def _move(update: Path, started: Path, sent: Sent, expected: Expected, decoded: Path) -> None:
    """Make `decoded` what a late update of the model `started` would be had it started from the model of this round."""
    moved = decoded.with_name(f"{decoded.name}.moved")
    shutil.rmtree(moved, ignore_errors=True)
    assert expected.earlier is not None
    with started_from(update, started, expected.earlier.seed, scratch=decoded.parent) as then:
        rebase(update, then=then, now=sent.directory, out=moved, facility=expected.facility)
    shutil.rmtree(decoded, ignore_errors=True)
    moved.rename(decoded)


def check_signature(update: Path, facility: str, allowed_signers: str) -> None:
    """Raise `InputError` unless the facility signed the manifest; an unsigned failure.json is quoted as unsigned."""
    try:
        verify_signature(update, facility, resolve_path(allowed_signers))
    except InputError as error:
        if (stated := report.read_failure(update)) is None:
            raise
        raise UpdateRefused(
            facility, f"{error}; its failure.json, which is not signed, says: {stated.reason}"
        ) from None


def check_signed_failure(signed: Manifest, stated: report.Failure, sent: Sent, facility: str) -> None:
    """Raise `UpdateRefused` where the signed manifest, which covers failure.json, is not of this run and federation.

    Whoever keeps a failure that was signed once could show it again in every later run.
    """
    try:
        check_run(signed, sent, facility)
        check_identity(signed, sent.manifest, facility, stated.round)
    except UpdateRefused as error:
        raise UpdateRefused(facility, f"{error.reason}; its failure.json says: {stated.reason}") from None


def _failure(update: Path, stated: report.Failure, sent: Sent, expected: Expected) -> report.Failure:
    """A facility's own account of its failure, in the name that the coordinator knows it by.

    Raises `InputError` where it is of another facility or round, or where what was signed is another failure, or one of
    another run or federation.
    """
    facility, round = expected.facility, expected.round
    if stated.facility not in (facility, "?"):  # a job of several tasks that failed early does not know its name
        raise UpdateRefused(facility, f"its failure.json is of facility {stated.facility!r}")
    if not 0 <= round - stated.round <= expected.settings.maximum_staleness:
        raise UpdateRefused(facility, f"its failure.json is of round {stated.round}, expected {round}")
    if expected.settings.allowed_signers:
        check_signed_failure(verify_manifest(update), stated, sent, facility)
    return report.Failure(
        facility=facility, round=round, reason=stated.reason, log_tail=stated.log_tail, again=stated.again
    )


def log_received(
    update: Path | None, facility: str, round: int, settings: AggregationSettings, failure: report.Failure | None
) -> None:
    """What came, with its digests and whose signature it bears, and what was decided, in the coordinator's log."""
    manifest = manifest_if_any(update) if update is not None else None
    signature = "none asked for"
    if settings.allowed_signers and update is not None:
        try:
            signature = verify_signature(update, facility, resolve_path(settings.allowed_signers))
        except (CrossFedError, OSError) as error:
            signature = f"refused: {clean_text(str(error), 300)}"
    digests: dict[str, str] = {}
    if update is not None and manifest is not None:
        theirs = clean_text(str(manifest.extra.get(HEAD, "")), 64)
        digests = {"manifest": sha256_of(update / NAME), "content": manifest.content_sha256, "facility_head": theirs}
    verdict = {"verdict": "accepted"} if failure is None else {"verdict": failure.kind, "reason": failure.reason}
    log_entry("received", facility=facility, round=round, signature=signature, **digests, **verdict)


def expected_of(settings: CoordinatorSettings, facility: str, round: int, model: Path, archive: str | None) -> Expected:
    """What the federation's settings say of a facility's update. `archive`: where late updates find their models."""
    earlier = (
        Earlier(archive=Archive(resolve_path(archive)), facility=facility, seed=settings.seed) if archive else None
    )
    refuses = settings.claims.action == "refuse"
    return Expected(
        facility=facility,
        round=round,
        model=model,
        evaluation=round >= settings.rounds,
        settings=settings.aggregation,
        weight_limit=weight_limit_of(settings, facility, model) if refuses else None,
        masks=settings.masks,
        moments=due_after(settings.masked_moments, round),
        adapters=settings.lora,
        earlier=earlier,
        content=not verified_as_averaged(settings),
        encoded=averaged_as_encoded(settings),
    )


def main() -> int:
    parser = step_parser("receive", __doc__, "model", "round", "facility")
    parser.add_argument("--update", type=Path, help="the update's directory; leave out when the facility left none")
    parser.add_argument("--archive", help="where late updates find the model that they started from")
    parser.add_argument(
        "--out", type=Path, required=True, help="directory to make: the sound update, or failure.json alone"
    )
    arguments = parser.parse_args()
    settings = read_coordinator_settings(arguments.federation)
    decoded = arguments.out.with_name(f".{arguments.out.name}.decoded")
    shutil.rmtree(decoded, ignore_errors=True)
    failure = receive(
        arguments.update,
        expected_of(settings, arguments.facility, arguments.round, arguments.model, arguments.archive),
        decoded=decoded,
        late=read_late(Path.cwd(), arguments.round, arguments.facility) if settings.closing else "",
        lost=read_lost(Path.cwd(), arguments.round, arguments.facility),
    )
    log_received(arguments.update, arguments.facility, arguments.round, settings.aggregation, failure)
    if failure is None:
        link_tree(decoded if decoded.exists() else arguments.update, arguments.out)
        shutil.rmtree(decoded, ignore_errors=True)
        log.info("update of %s for round %d is sound", arguments.facility, arguments.round)
        emit("received", facility=arguments.facility, round=arguments.round)
        return 0
    shutil.rmtree(decoded, ignore_errors=True)
    with new_directory(arguments.out) as temporary:
        report.write(temporary, failure)
    if arguments.update is not None:  # nothing in it says of which federation and round it is, or nothing that counts
        remove_transferred(Path.cwd(), arguments.update)
    if failure.reason == CARRIED:  # reported when the round closed, and nothing is lost
        return 0
    log.warning("round %d goes on without %s: %s", arguments.round, arguments.facility, failure.reason)
    emit("refused", facility=arguments.facility, round=arguments.round, reason=failure.reason)
    if lines := failure.log_tail.splitlines()[-LOG_LINES:]:
        emit("log", facility=arguments.facility, round=arguments.round, lines=[line[:LOG_COLUMNS] for line in lines])
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main, in_job=True))
