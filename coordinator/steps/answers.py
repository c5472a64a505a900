"""What a facility's answer must be, by kind of round: masked, evaluated or compared, and whose it is."""

from __future__ import annotations

from pathlib import Path

from coordinator.aggregation.adapter_fit import check_adapters, check_as_agreed
from coordinator.aggregation.masked_moments import check_masked_moments
from coordinator.aggregation.unmasking import match_masked
from coordinator.aggregation.updates import holds_adapters
from coordinator.aggregation.verify import check_identity, check_tokenizer, check_update
from coordinator.comparison.phases import checked
from coordinator.steps.expectation import Expected, Sent
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.moments import has_moments, shapes_in
from facility.exchange.errors import UpdateRefused
from facility.exchange.masking.streams import DTYPES
from facility.exchange.messages import report
from facility.exchange.messages.manifest import (
    Manifest,
    read_manifest,
    run_of,
    verify_manifest,
)
from facility.exchange.messages.strict_json import clean_text


def check_masked(update: Path, manifest: Manifest, sent: Sent, expected: Expected) -> None:
    """Check a masked update but for its values, which cannot be read. Raises `UpdateRefused` or `ManifestError`."""
    assert expected.masks is not None
    facility, bits, adapters = expected.facility, expected.masks.bits, expected.adapters
    verify_manifest(update)
    check_identity(manifest, sent.manifest, facility, expected.round)
    check_report(report.read_report(update), sent, facility)
    opened, agreed = open_checkpoint(update), adapters if adapters is not None and adapters.rank else None
    if holds_adapters(manifest) != (agreed is not None):
        raise UpdateRefused(
            facility, f"it holds {'adapters' if agreed is None else 'a whole model'}, which was not agreed"
        )
    if agreed is not None:
        check_adapters(sent.checkpoint, opened, facility)
        check_as_agreed(sent.checkpoint, opened, agreed, facility)
        if odd := {entry.dtype for entry in opened.tensors.values()} - {DTYPES[bits]}:
            raise UpdateRefused(facility, f"it holds tensors of {sorted(odd)}, expected {DTYPES[bits]}")
    else:
        match_masked(sent.checkpoint, opened, facility, bits, federated=expected.patterns.federated)
    if has_moments(update):
        raise UpdateRefused(facility, "it holds moments that are not masked")
    check_masked_moments(update, shapes_in(opened), facility, expected.moments)
    check_tokenizer(sent.directory, update, facility)


def check_evaluation(update: Path, sent: Sent, expected: Expected) -> None:
    """Check the answer to a final evaluation: a report without weights. Raises `UpdateRefused` or `ManifestError`."""
    manifest, facility, round = verify_manifest(update), expected.facility, expected.round
    check_run(manifest, sent, facility)
    check_identity(manifest, sent.manifest, facility, round)
    claimed = report.read_report(update)
    check_report(claimed, sent, facility)
    if claimed.round != round:
        raise UpdateRefused(facility, f"its report.json is of round {claimed.round}, expected {round}")


def check_no_weights(update: Path, facility: str) -> None:
    """Refuse weights of a single facility where secure aggregation hides them."""
    manifest = read_manifest(update)
    if manifest.parameters or any(name.endswith(".safetensors") for name in manifest.files):
        raise UpdateRefused(
            facility, "it holds weights: with privacy.secure_aggregation only figures of a facility's own models leave"
        )


def check_answer(update: Path, sent: Sent, expected: Expected) -> None:
    """Check the answer to a comparison: figures, or, where nothing is masked, a model that was trained alone."""
    if checked(read_manifest(update), sent.manifest, expected.facility) and expected.masks is None:
        check_update(
            update,
            base=sent.checkpoint,
            base_manifest=sent.manifest,
            facility=expected.facility,
            round=expected.round,
            adapters=expected.adapters,
        )


def check_report(claimed: report.Report, sent: Sent, facility: str) -> None:
    """Refuse the report of another facility or federation."""
    if (claimed.facility, claimed.federation) != (facility, sent.manifest.federation):
        raise UpdateRefused(
            facility,
            f"its report.json is of facility {claimed.facility!r} in federation {claimed.federation!r}, expected "
            f"{facility!r} in {sent.manifest.federation!r}",
        )


def check_run(manifest: Manifest, sent: Sent, facility: str) -> None:
    """Refuse an update of an earlier run: a federation that is begun again, under the same name, has another run id."""
    wanted, found = run_of(sent.manifest), run_of(manifest)
    if wanted and found != wanted:
        raise UpdateRefused(
            facility,
            f"it belongs to run {clean_text(found, 40) or '(none)'!r} of the federation, this is run {wanted!r}",
        )
