"""From a finished update to the masked one that travels: fixed point plus masks, streamed, and sealed shares beside it.

    y = round(weight * step / scale) + stream(own seed) +- stream(seed in common with each other)   modulo 2^bits

Of two facilities the one whose name comes first adds the stream that they have in common, the other subtracts it.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from facility.exchange.checkpoints.adapters import is_adapter, is_factor
from facility.exchange.checkpoints.begun_adapters import begun_factor
from facility.exchange.checkpoints.checkpoint import FLOATS, Checkpoint, TensorEntry, open_checkpoint
from facility.exchange.checkpoints.codecs import PART
from facility.exchange.checkpoints.companions import MOMENTS, copy_companions
from facility.exchange.checkpoints.delta_parts import READ, as_bytes, read_parts, write_difference
from facility.exchange.checkpoints.floats import Array, widen
from facility.exchange.checkpoints.writer import TensorWriter, layout_like
from facility.exchange.errors import CheckpointError, InputError
from facility.exchange.files.checksum import Checksum
from facility.exchange.files.durable import new_directory
from facility.exchange.masking.fixed_point import FixedPoint, clip_of, fixed_point
from facility.exchange.masking.roster import Roster
from facility.exchange.masking.shares import write_shares
from facility.exchange.masking.streams import DTYPES, SEED_BYTES, places_of
from facility.exchange.messages.manifest import Manifest, read_manifest, run_of, write_manifest
from facility.exchange.messages.masking import DETAILS, ENCODING, MaskingSettings
from facility.masking.mask_moments import mask_moments
from facility.masking.masked_piece import RESTS, Masker, Stored, count_clipped
from facility.masking.private_keys import Member
from facility.masking.sharing import share_seeds

CACHE_BYTES = 4 << 20
"""Of the streams of one piece."""
MOST_BEYOND = 1 / 16
"""Share of a step's values that the clips may cut off. What is left of such a value is its sign times its facility's
weight, and a sum of those shows which facilities' are positive: clips that cut off most would give all signs away. What
follows from earlier steps cuts off next to none."""
LOOKED_AT = 8
"""Of each piece of a step the first of so many parts is looked at for it, which takes next to no time."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One tensor of a step: the update's, and the received model's (None: a new adapter, which begins at zero)."""

    update: TensorEntry
    base: TensorEntry | None
    point: FixedPoint
    place: int
    """First element in the mask streams."""
    begun: Array | None = None
    """What a new adapter began with, flat, so that a clip shortens what it moved alone; None: with zeros."""


def mask_update(
    update: Path,
    *,
    received: Path,
    out: Path,
    residual_out: Path,
    member: Member,
    settings: MaskingSettings,
    seed: int | None = None,
) -> tuple[Manifest, dict[str, str]]:
    """Write the masked form of `update`, trained from `received`, and what it leaves to send.

    `seed`: the federation's, from which new adapters began; None: they began with zeros.

    Returns its manifest, and a checksum of each file of what it leaves, made of what is written (`Checksum`:
    sha256 would take as long as the masks). Neither `out` nor `residual_out` may exist. Raises `InputError` where the
    roster is for another model.
    """
    check_base(member.roster, received)
    with ExitStack() as stack:
        directory = stack.enter_context(new_directory(out))
        rest_directory = stack.enter_context(new_directory(residual_out))
        base = open_checkpoint(received)
        done = mask_tensors(
            open_checkpoint(update), base, directory, rest_directory, member=member, settings=settings, seed=seed
        )
        made = complete_masked_update(update, received, directory, done, member=member, settings=settings)
    return made, done.left


@dataclass(frozen=True, kw_only=True)
class MaskedTensors:
    """What masking left in two directories, and all that it takes to undo it: it stays at its facility."""

    masks: list[tuple[int, bytes]]
    """1 or -1, and the seed of each stream; the first is this facility's own."""
    units: dict[str, float]
    """Of a step, by tensor: what one whole number stands for."""
    sent: dict[str, str]
    """sha256 of the files that travel, by name."""
    left: dict[str, str]
    """A `Checksum` of each file of what is left to send."""


def mask_tensors(
    update: Checkpoint,
    base: Checkpoint,
    directory: Path,
    rest_directory: Path,
    *,
    member: Member,
    settings: MaskingSettings,
    seed: int | None = None,
) -> MaskedTensors:
    """Write the masked tensors of `update`, stored or in memory, and their shares to `directory`, and what they leave
    to `rest_directory`; both exist. `seed`: see `mask_update`.

    Its own seed is drawn here, for these tensors alone: two messages under one seed would show their difference.
    """
    roster, bits = member.roster, member.roster.agreement.bits
    weights = roster.weights(settings.weights, settings.maximum_share)
    sources = sources_of(update, base, roster, weights, seed if settings.clip_norm else None)
    factor = clip_factor(sources.values(), settings.clip_norm)
    own = draw_seed()
    masks, weight = signed_seeds(member, own), weights[member.facility]
    cut_off = values = 0
    layout, rest_layout = (layout_like(update, dict.fromkeys(sources, kinds[bits])) for kinds in (DTYPES, RESTS))
    with ExitStack() as open_files:
        writer = open_files.enter_context(TensorWriter(directory, layout, hashed=True))
        rests = open_files.enter_context(TensorWriter(rest_directory, rest_layout, hashed=True, digest=Checksum))
        piece = piece_of(len(masks), bits)
        masker = Masker(masks, piece=piece, bits=bits, weight=weight, factor=factor)
        for name, source in sources.items():
            for start, update_part, base_part in pieces_of(source, piece):
                whole = factor == 1 or source.begun is None
                part = update_part if whole else shortened(source, start, update_part, factor)
                sent, rest, squared = masker.mask(part, base_part, source.point, source.place + start, clips=whole)
                check_finite(source, squared)
                looked_at = rest[: -(-len(rest) // LOOKED_AT)]
                cut_off += count_clipped(looked_at, source.point.scale / weight)
                values += len(looked_at)
                writer.write(name, start * sent.itemsize, as_bytes(sent))
                rests.write(name, start * rest.itemsize, as_bytes(rest))
        digests, left = writer.digests(), rests.digests()
    check_clips(cut_off, values, roster)
    write_shares(directory, share_seeds(member, own))
    units = {name: source.point.scale / weight for name, source in sources.items()}
    return MaskedTensors(masks=masks, units=units, sent=digests, left=left)


def complete_masked_update(
    update: Path, received: Path, directory: Path, done: MaskedTensors, *, member: Member, settings: MaskingSettings
) -> Manifest:
    """Add what belongs to the masked tensors and shares in `directory`: what lies beside the weights of the finished
    `update`, its second moments under masks, and the manifest."""
    roster, manifest, bits = member.roster, read_manifest(update), member.roster.agreement.bits
    sent = open_checkpoint(directory)
    copy_companions(update, directory, leave=MOMENTS)
    if (moments := settings.moments_due(roster.agreement.round)) is not None:
        shapes = {name: tuple(entry.shape) for name, entry in sent.tensors.items()}
        weights, me = roster.weights(settings.weights, settings.maximum_share), member.facility
        mask_moments(update, directory, received, shapes, facility=me, masks=done.masks, weights=weights, sent=moments)
    stated = dataclasses.replace(
        manifest, encoding=ENCODING, files={}, dtypes={DTYPES[bits]: len(sent.tensors)}, parameters=sent.parameters
    )
    details = details_of(manifest, roster, settings)
    return write_manifest(directory, dataclasses.replace(stated, extra=manifest.extra | {DETAILS: details}), done.sent)


def draw_seed() -> bytes:
    """A new seed of this facility's own."""
    return os.urandom(SEED_BYTES)


def details_of(manifest: Manifest, roster: Roster, settings: MaskingSettings) -> dict[str, Any]:
    """What a masked update states of itself, and its facility signs. `manifest`: of the finished update."""
    moments = settings.moments_due(roster.agreement.round)
    details = {
        "bits": roster.agreement.bits,
        "roster": roster.digest,
        "clip_norm": settings.clip_norm,
        "adapters": manifest.encoding == "lora",
    }
    return details if moments is None else details | {"moments": moments.common}


def signed_seeds(member: Member, own: bytes) -> list[tuple[int, bytes]]:
    """What is added and subtracted: 1 or -1, and the seed of each stream."""
    others = [name for name in member.roster.members if name != member.facility]
    return [(1, own)] + [(1 if member.facility < other else -1, member.seed(other)) for other in others]


def check_base(roster: Roster, received: Path) -> None:
    """Raise `InputError` unless the roster is for the round of this model."""
    sent, agreement = read_manifest(received), roster.agreement
    expected = (run_of(sent), sent.round, sent.content_sha256)
    if (agreement.run, agreement.round, agreement.base_sha256) != expected:
        raise InputError(
            f"the roster is for round {agreement.round} from model {agreement.base_sha256:.12}, the received model is "
            f"of round {sent.round} ({sent.content_sha256:.12})"
        )


def sources_of(
    update: Checkpoint, base: Checkpoint, roster: Roster, weights: dict[str, float], seed: int | None
) -> dict[str, Source]:
    """The floating-point tensors of an update, in the order of their names. Raises `CheckpointError`."""
    entries = {name: entry for name, entry in sorted(update.tensors.items()) if entry.dtype in FLOATS}
    places = places_of({name: entry.elements for name, entry in entries.items()})
    found: dict[str, Source] = {}
    for name, entry in entries.items():
        before = base.tensors.get(name)
        if before is None and not is_adapter(name):
            raise CheckpointError(f"{update.directory}: tensor {name!r} is not in the received model")
        agreement = roster.agreement
        clip = clip_of(name, entry.shape, clips=agreement.clips, default=agreement.default_clip, new=before is None)
        point = fixed_point(agreement.bits, clip, weights)
        begun = None
        if before is None and is_factor(name) and seed is not None:
            begun = begun_factor(seed, name, entry.shape).reshape(-1)
        found[name] = Source(update=entry, base=before, point=point, place=places[name], begun=begun)
    return found


def piece_of(streams: int, bits: int) -> int:
    """Elements to mask at a time: the more, the fewer calls; but all streams of a piece stay in a core's cache."""
    piece = READ
    while piece > PART and streams * piece * bits // 8 > CACHE_BYTES:
        piece //= 2
    return piece


def pieces_of(source: Source, piece: int = PART) -> Iterator[tuple[int, Stored, Stored | None]]:
    """(first element, update, received model) of each piece, as stored, in buffers that are used again."""
    entries = [source.update] if source.base is None else [source.update, source.base]
    for start, arrays in read_parts(entries, piece=piece):
        update, *base = (Stored(values=array, dtype=entry.dtype) for array, entry in zip(arrays, entries, strict=True))
        yield start, update, base[0] if base else None


def squares_of(source: Source) -> Iterator[float]:
    """The sum of squares of each piece of update - model, in float32."""
    block, scratch = np.empty(PART, np.float32), np.empty(PART, np.float32)
    for start, update, base in pieces_of(source):
        step = block[: len(update.values)]
        if base is None:
            widen(update.values, update.dtype, step)
            squared = float(np.vdot(step, step))
        else:
            squared = write_difference(base.values, base.dtype, update.values, update.dtype, step, scratch[: len(step)])
        check_finite(source, squared)
        if source.begun is not None:
            step -= source.begun[start : start + len(step)]
        yield float(np.vdot(step, step))


def shortened(source: Source, start: int, update: Stored, factor: float) -> Stored:
    """A piece of a new adapter whose distance from what it began with is multiplied by `factor`."""
    assert source.begun is not None
    begun, moved = source.begun[start : start + len(update.values)], np.empty(len(update.values), np.float32)
    widen(update.values, update.dtype, moved)
    return Stored(values=begun + np.float32(factor) * (moved - begun), dtype="F32")


def check_finite(source: Source, squared: float) -> None:
    """Raise `CheckpointError` for NaN and infinity."""
    if not math.isfinite(squared):
        raise CheckpointError(f"tensor {source.update.name!r} holds NaN, infinity or absurdly large values")


def check_clips(cut_off: int, values: int, roster: Roster) -> None:
    """Raise `InputError` where the clips of the roster cut off more than `MOST_BEYOND` of the values of a step."""
    if cut_off > MOST_BEYOND * values:
        raise InputError(
            f"{cut_off / values:.0%} of this step's values are beyond the clips of round {roster.agreement.round}, "
            f"expected {MOST_BEYOND:.0%} at most: nothing is masked, for a sum of values that are cut off gives away "
            "the sign of each facility's; smaller steps, or other clips of the coordinator's, are needed"
        )


def clip_factor(sources: Iterable[Source], clip_norm: float) -> float:
    """What the whole step is multiplied by, so that its L2 norm is at most `clip_norm`; 0: no limit."""
    if not clip_norm:
        return 1.0
    squared = math.fsum(one for source in sources for one in squares_of(source))
    return min(1.0, clip_norm / math.sqrt(squared)) if squared else 1.0
