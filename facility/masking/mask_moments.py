"""Second moments of an update under masks: within the agreed limits, as whole numbers, beside the masked update.

The limits are the facility's to keep, since nobody sees a single facility's moments: no value above the range, and of
each parameter no more than `GROWTH` times the mean that came with the received model. The update's manifest, which the
facility signs, states them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.codecs import PART
from facility.exchange.checkpoints.delta_parts import as_bytes
from facility.exchange.checkpoints.second_moments import (
    FOLDER,
    Factors,
    has_factors,
    kept_of,
    manifest_header,
    read_factors,
)
from facility.exchange.checkpoints.writer import Planned, TensorWriter, layout_of_shards
from facility.exchange.errors import ManifestError
from facility.exchange.masking.moments import BITS, MARK, Units, add_streams, moment_places, seed_of
from facility.exchange.masking.streams import DTYPES, MaskBuffer
from facility.exchange.messages.manifest import check_digest, read_manifest, sha256_of
from facility.exchange.messages.masking import GROWTH, MaskedMoments


def mask_moments(
    update: Path,
    out: Path,
    received: Path,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    facility: str,
    masks: Sequence[tuple[int, bytes]],
    weights: Mapping[str, float],
    sent: MaskedMoments,
) -> None:
    """Write `out`/second_moments from those of a finished update.

    `shapes`: of the tensors that are masked. `masks`: 1 or -1, and the seed of each of the update's streams. An update
    that has no second moments sends zeros, so that the others' masks cancel.
    """
    units = Units(largest=sent.range, weights=weights)
    found, steps, kept = dict[str, Factors](), 0.0, 0.0
    if has_factors(update):
        (found, steps), kept = read_factors(update, shapes), kept_of(update)
    before = received_moments(received)
    streams = [(sign, seed_of(seed)) for sign, seed in masks]
    buffer, laid = MaskBuffer(PART, BITS), moment_places(shapes)
    layout = layout_of_shards(
        [Planned(name=name + MARK, dtype=DTYPES[BITS], shape=(one.values,)) for name, one in laid.items()], 2**31
    )
    (out / FOLDER).mkdir()
    with TensorWriter(out / FOLDER, layout, manifest_header(steps, kept)) as writer:
        for name, place in laid.items():
            values = place.joined(limited(found.get(name), before.get(name)), sent.range)
            numbers = units.encode(values, weights[facility])
            add_streams(numbers, place, streams, buffer)
            writer.write(name + MARK, 0, as_bytes(numbers))


def limited(factors: Factors | None, before: Factors | None) -> Factors | None:
    """A parameter's second moments, scaled down to `GROWTH` times the mean of those received, where any were."""
    if factors is None or before is None or before.mean <= 0:
        return factors
    return factors.at_most(GROWTH * before.mean)


def received_moments(received: Path) -> dict[str, Factors]:
    """Second moments that came with the model. Raises `ManifestError` where a file is not as the roster binds it.

    A facility that limited its own by others than the rest would be the sum.
    """
    if not has_factors(received):
        return {}
    manifest = read_manifest(received)
    for path in sorted((received / FOLDER).iterdir()):
        if (name := f"{FOLDER}/{path.name}") not in manifest.files:
            raise ManifestError(f"{received} holds {name}, which its manifest does not name")
        check_digest(received, manifest, name, sha256_of(path))
    shapes = {name: tuple(entry.shape) for name, entry in open_checkpoint(received).tensors.items()}
    return read_factors(received, shapes)[0]
