"""What the trainer masked from memory in place of writing its update, until the round is over.

    STATE/masking/held/sent        the masked tensors as they travel, and the sealed shares of their seeds
    STATE/masking/held/held.json   the seeds themselves, what a unit stands for, and the digests; for this account alone
    STATE/residual/pending         what fixed point leaves, then `round-N`

Sent and rest together are the step to within what the rest was rounded to, so under another roster the update is
computed from them and masked anew: nothing is trained twice, and no seed of its own masks two contents. With the seeds
these files are worth as much as the update itself, which they stand for in the same place for the same time.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facility.exchange.checkpoints.checkpoint import Checkpoint, Opened, TensorEntry, open_checkpoint
from facility.exchange.checkpoints.delta_parts import READ, as_bytes
from facility.exchange.checkpoints.floats import STORAGE, Array, widen
from facility.exchange.checkpoints.writer import TensorWriter, layout_like
from facility.exchange.errors import InputError
from facility.exchange.files.durable import new_directory, write_bytes
from facility.exchange.json_values import note_in, values_in
from facility.exchange.masking.streams import SIGNED, UNSIGNED, MaskBuffer, places_of
from facility.exchange.messages.manifest import sha256_of
from facility.exchange.messages.masking import MaskingSettings
from facility.masking.mask_update import MaskedTensors, mask_tensors
from facility.masking.private_keys import Member
from facility.rounds.sealed import SEAL, find_flaw, write_seal
from facility.rounds.smaller import keep_pending, pending_residual, residual_path

NAME, SENT = "held.json", "sent"


@dataclass(frozen=True, kw_only=True)
class Held:
    """The masked tensors of one update."""

    place: Path
    round: int
    roster: str
    """Digest of that under which they were masked."""
    bits: int
    masked: MaskedTensors

    @property
    def sent(self) -> Path:
        return self.place / SENT


def is_held(update: Path) -> bool:
    """Whether a finished update is without its weights, since the trainer masked them."""
    return not any(update.glob("*.safetensors"))


def write_held(
    state: Path, round: int, update: Checkpoint, received: Path, *, member: Member, settings: MaskingSettings, seed: int
) -> None:
    """Mask an update that is in memory. What an earlier attempt left must have been removed (`drop_held`).

    `seed`: the federation's.
    """
    pending = pending_residual(state)
    with new_directory(_place(state)) as place:
        (place / SENT).mkdir()
        with new_directory(pending) as rest:
            base = open_checkpoint(received)
            done = mask_tensors(update, base, place / SENT, rest, member=member, settings=settings, seed=seed)
        write_seal(pending, done.left)
        value = {
            "round": round,
            "roster": member.roster.digest,
            "bits": member.roster.agreement.bits,
            "masks": [[sign, seed.hex()] for sign, seed in done.masks],
            "units": done.units,
            "sent": done.sent,
            "left": done.left,
        }
        write_bytes(place / NAME, json.dumps(value).encode(), mode=0o600)


def read_held(state: Path, round: int, *, verify: bool = False) -> Held | None:
    """What was masked of a round's update; None where there is none. `verify`: nor where a file was altered."""
    place = _place(state)
    try:
        value = values_in(place / NAME)
        masks = [(int(sign), bytes.fromhex(seed)) for sign, seed in value["masks"]]
        done = MaskedTensors(masks=masks, units=value["units"], sent=value["sent"], left=value["left"])
        held = Held(
            place=place, round=int(value["round"]), roster=value["roster"], bits=int(value["bits"]), masked=done
        )
        altered = verify and any(sha256_of(held.sent / name) != digest for name, digest in done.sent.items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if held.round != round or altered or (verify and ((rest := rest_of(state, held)) is None or find_flaw(rest))):
        return None
    return held


def drop_held(state: Path) -> None:
    """Remove it."""
    shutil.rmtree(_place(state), ignore_errors=True)


def rest_of(state: Path, held: Held) -> Path | None:
    """Where what it leaves to send is: in waiting, or kept as the round's already."""
    for place in (pending_residual(state), residual_path(state, held.round)):
        if note_in(place / SEAL) == held.masked.left:
            return place
    return None


def keep_rest(state: Path, held: Held) -> None:
    """Make what it leaves to send that of its round. Raises `InputError` where it is not here."""
    rest = rest_of(state, held)
    if rest is None:
        raise InputError(f"what {held.place} leaves to send is not in {pending_residual(state)}: run the round again")
    if rest == pending_residual(state):
        keep_pending(state, held.round)


def take_off(state: Path, held: Held, base: Checkpoint, directory: Path) -> int:
    """Write the tensors of the update to `directory` in float32: received, plus what was sent, plus what was left.

    Returns how many. A norm that was clipped stays so. Raises `InputError`.
    """
    place = rest_of(state, held)
    if place is None:
        raise InputError(f"what {held.place} leaves to send is not here: run the round again")
    sent, rest = open_checkpoint(held.sent), open_checkpoint(place)
    places = places_of({name: entry.elements for name, entry in sent.tensors.items()})
    buffer = MaskBuffer(READ, held.bits)
    with Opened() as read, TensorWriter(directory, layout_like(sent, dict.fromkeys(sent.tensors, "F32"))) as writer:
        for name, entry in sorted(sent.tensors.items()):
            before = base.tensors.get(name)
            for start in range(0, entry.elements, READ):
                count = min(READ, entry.elements - start)
                numbers = _piece(read, entry, start, np.empty(count, UNSIGNED[held.bits]))
                for sign, seed in held.masked.masks:
                    buffer.add_to(numbers, -sign, seed, places[name] + start)
                values = numbers.view(SIGNED[held.bits]) * held.masked.units[name]
                for stored in (rest.tensors[name], *([] if before is None else [before])):
                    values += _widened(read, stored, start, count)
                part = values.astype(np.float32)
                writer.write(name, start * part.itemsize, as_bytes(part))
    return len(sent.tensors)


def _widened(read: Opened, entry: TensorEntry, start: int, count: int) -> Array:
    """Elements of a stored tensor in float64."""
    out = np.empty(count, np.float64)
    widen(_piece(read, entry, start, np.empty(count, STORAGE[entry.dtype])), entry.dtype, out)
    return out


def _piece(read: Opened, entry: TensorEntry, start: int, out: Array) -> Array:
    """Elements of a stored tensor as they lie, from `start` on."""
    read(entry, start * out.itemsize, as_bytes(out))
    return out


def _place(state: Path) -> Path:
    return Path(state) / "masking" / "held"
