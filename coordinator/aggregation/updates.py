"""The updates of a round as opened directories, sorted by facility, with their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.aggregation.matching import match_tensors
from coordinator.aggregation.verify import check_identity, check_tokenizer
from coordinator.config.aggregation import AggregationSettings
from facility.exchange.checkpoints.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.errors import CheckpointError, ConfigurationError, InputError, UpdateRefused
from facility.exchange.messages.manifest import NAME, Manifest, read_manifest
from facility.exchange.messages.report import REPORT, Report, read_failure, read_report


@dataclass(frozen=True, kw_only=True)
class Update:
    """One facility's update, opened and matched to the base, not yet read."""

    facility: str
    directory: Path
    checkpoint: Checkpoint
    entries: dict[str, TensorEntry]
    """By the base's tensor names; federated tensors only."""
    report: Report | None
    staleness: int
    """Rounds it is late."""


def open_updates(
    directories: Sequence[Path],
    base: Checkpoint,
    base_manifest: Manifest | None,
    settings: AggregationSettings,
) -> list[Update]:
    """Open every update and refuse what does not fit the base; sorted by facility.

    The facility's name comes from the manifest, else from the report, else from the directory's own name.
    """
    if not directories:
        raise InputError("there are no updates: expected at least one --update DIR")
    patterns = Patterns(tuple(settings.include), tuple(settings.exclude))
    found: dict[str, Update] = {}
    for directory in map(Path, directories):
        update = _open(directory, base, base_manifest, settings, patterns)
        if update.facility in found:
            raise InputError(
                f"{directory} and {found[update.facility].directory} are both updates of facility "
                f"{update.facility!r}: give each facility once"
            )
        found[update.facility] = update
    return [found[name] for name in sorted(found)]


def _open(
    directory: Path,
    base: Checkpoint,
    base_manifest: Manifest | None,
    settings: AggregationSettings,
    patterns: Patterns,
) -> Update:
    facility = directory.resolve().name
    try:
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is no directory")
        if failure := read_failure(directory):
            raise UpdateRefused(failure.facility, f"it reports a failure: {failure.reason}")
        manifest = read_manifest(directory) if (directory / NAME).exists() else None
        report = read_report(directory) if (directory / REPORT).exists() else None
        facility = (manifest and manifest.facility) or (report and report.facility) or facility
        if report and report.facility != facility:
            raise UpdateRefused(facility, f"its report.json is of facility {report.facility!r}")
        staleness = 0
        if manifest and base_manifest:
            check_identity(
                manifest, base_manifest, facility, base_manifest.round, maximum_staleness=settings.maximum_staleness
            )
            staleness = base_manifest.round - manifest.round
        elif base_manifest:
            raise UpdateRefused(
                facility, f"{directory} holds no {NAME}, but the base has one: the update is incomplete"
            )
        checkpoint = open_checkpoint(directory)
        check_tokenizer(base.directory, directory, facility)
        entries = match_tensors(base, checkpoint, facility, federated=patterns.federated)
    except UpdateRefused:
        raise
    except CheckpointError as error:
        raise UpdateRefused(facility, str(error)) from None
    return Update(
        facility=facility,
        directory=directory,
        checkpoint=checkpoint,
        entries=entries,
        report=report,
        staleness=staleness,
    )


def weights_of(updates: Sequence[Update], settings: AggregationSettings) -> list[float]:
    """What each update counts, summing to 1, staleness included.

    FedAsync's polynomial discount of late models: C. Xie, S. Koyejo, I. Gupta, "Asynchronous federated optimization",
    2019, arXiv 1903.03934, section 5.2.
    """
    kind = settings.weights
    raw: list[float] = []
    for update in updates:
        if isinstance(kind, dict):
            if update.facility not in kind:
                raise ConfigurationError(
                    f"weights name {', '.join(sorted(kind))}, but there is an update of facility {update.facility!r}",
                    key="aggregation.weights",
                )
            weight = float(kind[update.facility])
        elif kind == "equal":
            weight = 1.0
        else:
            if update.report is None:
                raise UpdateRefused(
                    update.facility,
                    f"it holds no {REPORT}, which says its {kind}; set weights to 'equal' or to numbers by facility",
                )
            weight = float(getattr(update.report, kind))
        if not 0 < weight < math.inf:
            raise UpdateRefused(update.facility, f"its weight is {weight:g} ({kind}), expected more than 0")
        raw.append(weight * (1 + update.staleness) ** -settings.staleness_exponent)
    total = math.fsum(raw)
    return [weight / total for weight in raw]
