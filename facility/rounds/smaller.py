"""An update written as the difference to the model it started from, before it travels.

What the encoding loses stays under the facility's state directory, and training goes on from it in the next round: its
weights begin as the received model plus what of this facility's steps has not been sent. Adding it to the next
difference only (error feedback as usual) makes many local steps take the same way again, and then it is sent twice. A
codec that fades leaves most of a step, and training from all of it would be training from another model than all others
do: a share of it is trained from (`training.unsent_share`), and the rest is added to the next difference. A trainer of
one's own need not know of that: it begins with the received model, and all of it is added.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from facility.exchange.checkpoints.checkpoint import ADAPTER
from facility.exchange.checkpoints.delta import Encoded, encode_update
from facility.exchange.checkpoints.delta_parts import FILE
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.delta_codecs import FULL, fading_of, trained_from
from facility.exchange.errors import InputError
from facility.exchange.files import present
from facility.exchange.files.durable import fsync_directory
from facility.exchange.messages.settings import TrainingSettings
from facility.rounds.kept import by_round, latest_before
from facility.rounds.sealed import SEAL, write_seal

PENDING = "pending"
"""In the residual's directory: of an update that is not complete."""


def make_smaller(
    update: Path,
    *,
    model: Path,
    state: Path,
    round: int,
    settings: TrainingSettings,
    patterns: Patterns,
    built_in: bool = True,
    norms: bool = False,
    masked: bool = False,
) -> Encoded | None:
    """Replace the directory `update` by its message in `settings.encoding`; None where that is `full`.

    With `full`, what earlier messages left is in the update, and nothing is left by it, unless it is `masked`
    afterwards. Adapters travel in full: the model that was received may hold none, or more than them. `update` was
    trained from `residual_to_resume`, so its difference to `model` holds what was not sent before; with a codec that
    fades, the rest of it is added here. `built_in`: CrossFed's own trainer trained it. `norms`: state the norm of the
    step that the message decodes to. A trainer that was given `pending_residual` may have written the message already.
    """
    if (update / FILE).is_file():
        keep_pending(state, round)
        return None
    if settings.encoding == FULL and not masked and _left_before(state, round) is not None:
        leave_nothing(state, round)
    if settings.encoding == FULL or (update / ADAPTER).is_file():
        return None
    message = update.with_name(f".{update.name}.message")
    after = residual_path(state, round)
    for leftover in (after, message):  # of an earlier attempt at the same round
        shutil.rmtree(leftover, ignore_errors=True)
    done = encode_update(
        full=update,
        reference=model,
        out=message,
        encoding=settings.encoding,
        residual_out=after,
        density=settings.sparse_density,
        patterns=patterns,
        norms=norms,
        ahead=residual_to_add(state, round, settings),
        taken=_taken(settings, built_in),
    )
    keep_residual(state, round, done.residual_checksums)
    shutil.rmtree(update)
    message.rename(update)
    return done


def pending_residual(state: Path) -> Path:
    """Where the trainer seals what its message leaves out; it counts once the round has that message."""
    return _home(state) / PENDING


def drop_pending(state: Path) -> None:
    """Remove what an earlier attempt left there."""
    shutil.rmtree(pending_residual(state), ignore_errors=True)


def keep_pending(state: Path, round: int) -> None:
    """Make what the trainer sealed the residual of `round`. Raises `InputError` where it left none."""
    if not present.is_file(pending_residual(state) / SEAL):
        raise InputError(
            f"the update is a difference, but {pending_residual(state)} does not hold what it leaves out: "
            "run the round again"
        )
    shutil.rmtree(residual_path(state, round), ignore_errors=True)  # of an earlier attempt at the same round
    pending_residual(state).rename(residual_path(state, round))
    fsync_directory(_home(state))
    _drop_before(state, round)


def residual_to_resume(
    state: Path, round: int, settings: TrainingSettings, *, masked: bool = False, built_in: bool = True
) -> Path | None:
    """The residual of messages before `round`, which training goes on from: a checkpoint of the tensors concerned;
    None if there is none, or if it fades and the trainer is not CrossFed's own, which takes a share. Where updates
    travel whole again, CrossFed's own trainer sends it with the first of them; another one does not ask for it."""
    whole = settings.encoding == FULL
    goes_on = masked or (built_in if whole else _taken(settings, built_in))
    return _left_before(state, round) if goes_on else None


def residual_to_add(state: Path, round: int, settings: TrainingSettings) -> Path | None:
    """The residual that the message of `round` adds to its difference, in an encoding that fades; None: nothing."""
    return _left_before(state, round) if fading_of(settings.encoding) else None


def _taken(settings: TrainingSettings, built_in: bool) -> float:
    """The share of what earlier messages left that training begins with."""
    return trained_from(settings.encoding, settings.unsent_share if built_in else 0.0)


def _left_before(state: Path, round: int) -> Path | None:
    """What the messages before `round` left, if there is any."""
    found = latest_before(_home(state), round)
    return found if found is not None and any(found.glob("*.safetensors")) else None


def residual_path(state: Path, round: int) -> Path:
    """Where what `round` left unsent is kept."""
    return _home(state) / f"round-{round}"


def keep_residual(state: Path, round: int, known: Mapping[str, str] | None = None) -> None:
    """Seal what `round` left unsent, and remove those of rounds before, but the last: it is needed if this round is
    repeated. `known`: checksums of files, made as they were written."""
    if present.is_dir(directory := residual_path(state, round)):
        write_seal(directory, known)
    _drop_before(state, round)


def leave_nothing(state: Path, round: int) -> None:
    """Say that after `round` nothing is unsent; what was before stays for the case that the round is repeated."""
    after = residual_path(state, round)
    shutil.rmtree(after, ignore_errors=True)
    after.mkdir()
    keep_residual(state, round)


def _drop_before(state: Path, round: int) -> None:
    kept = by_round(_home(state))
    later = [number for number in kept if number > round]  # of rounds that were set aside, or of another run
    for number in [*sorted(number for number in kept if number < round)[:-1], *later]:
        shutil.rmtree(kept[number], ignore_errors=True)


def _home(state: Path) -> Path:
    return Path(state) / "residual"
