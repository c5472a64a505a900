"""The updates of a round as opened directories, sorted by facility, with their weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.verify import check_identity, check_tokenizer, open_update
from facility.exchange.checkpoints.checkpoint import Checkpoint, TensorEntry
from facility.exchange.errors import CheckpointError, ConfigurationError, InputError, UpdateRefused
from facility.exchange.files import present
from facility.exchange.files.bounded import real_path
from facility.exchange.messages.manifest import NAME, Manifest, read_manifest
from facility.exchange.messages.masking import DETAILS, ENCODING
from facility.exchange.messages.report import REPORT, Report, read_failure, read_report


@dataclass(frozen=True, kw_only=True)
class Update:
    """One facility's update, opened and matched to the base, not yet read."""

    facility: str
    directory: Path
    checkpoint: Checkpoint
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    """By the base's tensor names; federated tensors only. Empty until they are matched."""
    adapters: bool = False
    """Whether it holds adapters alone, by its manifest."""
    report: Report | None
    staleness: int
    """Rounds it is late."""


def open_updates(
    directories: Mapping[str, Path] | Sequence[Path],
    base: Checkpoint,
    base_manifest: Manifest | None,
    settings: AggregationSettings,
    drop: Callable[[UpdateRefused], None],
) -> list[Update]:
    """Open every update, sorted by facility; what does not belong to the round is given to `drop`.

    Whose an update is, a mapping says; else its manifest, its report, or the name of its directory.
    """
    if not directories:
        raise InputError("there are no updates: expected at least one --update DIR")
    named = directories.items() if isinstance(directories, Mapping) else ((None, path) for path in directories)
    found: dict[str, Update] = {}
    for facility, directory in named:
        try:
            update = _open(Path(directory), base, base_manifest, settings, facility)
        except UpdateRefused as refusal:
            drop(refusal)
            continue
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
    known: str | None,
) -> Update:
    """One update; every refusal names the facility `known`, where the caller knows it."""
    facility = known or real_path(directory).name
    try:
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory")
        if failure := read_failure(directory):
            raise UpdateRefused(known or failure.facility, f"it reports a failure: {failure.reason}")
        manifest = read_manifest(directory) if present.exists(directory / NAME) else None
        report = read_report(directory) if present.exists(directory / REPORT) else None
        facility = known or (manifest and manifest.facility) or (report and report.facility) or facility
        if report and report.facility != facility:
            raise UpdateRefused(facility, f"its report.json is of facility {report.facility!r}")
        staleness = _staleness(directory, manifest, base_manifest, facility, settings)
        checkpoint = open_update(directory, manifest, base.directory, base_manifest)
        check_tokenizer(base.directory, directory, facility)
    except UpdateRefused:
        raise
    except CheckpointError as error:
        raise UpdateRefused(facility, str(error)) from None
    return Update(
        facility=facility,
        directory=directory,
        checkpoint=checkpoint,
        adapters=manifest is not None and holds_adapters(manifest),
        report=report,
        staleness=staleness,
    )


def holds_adapters(manifest: Manifest) -> bool:
    """Whether an update holds adapters alone."""
    if manifest.encoding == ENCODING:
        details = manifest.extra.get(DETAILS)
        return isinstance(details, dict) and details.get("adapters") is True
    return manifest.encoding == "lora"


def _staleness(
    directory: Path, manifest: Manifest | None, base: Manifest | None, facility: str, settings: AggregationSettings
) -> int:
    """Rounds that an update is late. Raises `UpdateRefused` for one of another round, model or federation."""
    if base is None:
        return 0
    if manifest is None:
        raise UpdateRefused(facility, f"{directory} holds no {NAME}, but the base has one: the update is incomplete")
    check_identity(manifest, base, facility, base.round, maximum_staleness=settings.maximum_staleness)
    return base.round - manifest.round


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
                    f"weights name {', '.join(sorted(kind))}, but there is an update of facility {update.facility!r}; "
                    "give it a weight, or leave its update out",
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
