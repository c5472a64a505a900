"""Make the roster of a round from the facilities' signed keys, and read it as the facilities do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coordinator.archive.rounds import CLIPS, Archive
from coordinator.config.settings import CoordinatorSettings
from coordinator.rounds.weight_limit import weight_limit_of
from facility.exchange.errors import CrossFedError, InputError
from facility.exchange.files import present
from facility.exchange.files.paths import resolve_path
from facility.exchange.json_values import values_in
from facility.exchange.masking.roster import (
    Agreement,
    Keys,
    Roster,
    base_of,
    check_signers,
    read_keys,
    read_roster,
    write_roster,
)
from facility.exchange.masking.walks import odd_ones
from facility.exchange.messages.masking import MaskingSettings
from facility.exchange.messages.report import read_failure
from facility.exchange.messages.strict_json import clean_text


def settings_of(settings: CoordinatorSettings) -> MaskingSettings:
    """Masking settings as each facility was given them, with the coordinator's own file of signers."""
    privacy, aggregation = settings.masks, settings.aggregation
    assert privacy is not None and not isinstance(aggregation.weights, dict)
    return MaskingSettings(
        bits=privacy.bits,
        threshold=privacy.threshold_of(len(settings.facilities)),
        minimum_sum=privacy.least_sum_of(len(settings.facilities)),
        facilities=sorted(settings.facilities),
        weights=aggregation.weights,
        maximum_share=aggregation.maximum_share,
        clip_norm=privacy.clip_norm,
        peer_signers=aggregation.allowed_signers,
        moments=settings.masked_moments,
    )


def open_roster(directory: Path, settings: CoordinatorSettings) -> Roster:
    """Raises `ManifestError`."""
    masking = settings_of(settings)
    return read_roster(directory, masking, resolve_path(masking.peer_signers))


def make_roster(
    directory: Path, *, archive: Archive, settings: CoordinatorSettings, model: Path, keys: Sequence[Path]
) -> dict[str, str]:
    """Write the roster of the round that `model` begins; returns why directories of keys were left out, by their name.

    Whose keys a directory holds, its signature says.
    """
    run, base_sha256, number = base_of(model)
    masking = settings_of(settings)
    found: dict[str, Path] = {}
    read: dict[str, Keys] = {}
    signers: dict[str, str] = {}
    refused: dict[str, str] = {}
    for path in keys:
        try:
            one, signer = _usable(path, settings, model, number)
            if one.facility in found:
                raise InputError(f"{one.facility!r} left keys twice; the first ones count")
            check_signers(signers | {one.facility: signer})
            signers[one.facility] = signer
            found[one.facility], read[one.facility] = path, one
        except (CrossFedError, OSError) as error:
            refused[str(path)] = clean_text(str(error), 300)
    for name, reason in odd_ones(read).items():
        refused[str(found.pop(name))] = clean_text(reason, 300)
    agreement = Agreement(
        federation=settings.federation,
        run=run,
        round=number,
        base_sha256=base_sha256,
        bits=masking.bits,
        threshold=masking.threshold,
        default_clip=settings.largest_step,
        clips=_clips(archive, number),
    )
    write_roster(directory, agreement, found)
    return refused


def _usable(path: Path, settings: CoordinatorSettings, model: Path, number: int) -> tuple[Keys, str]:
    """The keys, and who signed them. Raises `InputError` where they may not take part."""
    if (failure := read_failure(path)) is not None:
        raise InputError(f"{failure.facility}: {failure.reason}")
    keys, signer = read_keys(path, resolve_path(settings.aggregation.allowed_signers))
    if keys.facility not in settings.facilities:
        known = ", ".join(settings.facilities)
        raise InputError(f"the keys are of {keys.facility!r}, expected a facility of this federation: {known}")
    if (keys.federation, keys.round) != (settings.federation, number):
        raise InputError(
            f"the keys of {keys.facility!r} are of round {keys.round} of {keys.federation!r}, expected round {number} "
            f"of {settings.federation!r}"
        )
    weight_limit = weight_limit_of(settings, keys.facility, model)
    if weight_limit is not None and (keys.samples > weight_limit.samples or keys.tokens > weight_limit.tokens):
        raise InputError(
            f"the keys of {keys.facility!r} claim {keys.samples:,} samples and {keys.tokens:,} tokens, its settings "
            f"allow {weight_limit.samples:,} and {weight_limit.tokens:,} ({weight_limit.why})"
        )
    return keys, signer


def _clips(archive: Archive, number: int) -> dict[str, float]:
    """By tensor, from the step of the round before; {} where there is none."""
    path = archive.round_directory(number - 1) / CLIPS
    return dict(values_in(path)) if number and present.exists(path) else {}
