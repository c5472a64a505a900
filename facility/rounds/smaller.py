"""An update written as the difference to the model it started from, before it travels.

What the encoding loses stays under the facility's state directory, and training goes on from it in the next round: its
weights begin as the received model plus what of this facility's steps has not been sent. Adding it to the next
difference only (error feedback as usual) makes many local steps take the same way again, and then it is sent twice.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from facility.exchange.checkpoints.checkpoint import ADAPTER
from facility.exchange.checkpoints.delta import Encoded, encode
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.messages.settings import TrainingSettings
from facility.rounds.kept import by_round, latest_before
from facility.rounds.sealed import seal


def make_smaller(
    update: Path,
    *,
    model: Path,
    state: Path,
    round: int,
    settings: TrainingSettings,
    patterns: Patterns,
    norms: bool = False,
) -> Encoded | None:
    """Replace the directory `update` by its message in `settings.encoding`; None where that is `full`.

    The first adapters of a model without any differ from nothing that was received, and travel in full. `update` was
    trained from `unsent`, so its difference to `model` holds what was not sent before. `norms`: state the norm of the
    step that the message decodes to.
    """
    if settings.encoding == "full" or ((update / ADAPTER).is_file() and not (model / ADAPTER).is_file()):
        return None
    message = update.with_name(f".{update.name}.message")
    after = residual_path(state, round)
    for leftover in (after, message):  # of an earlier attempt at the same round
        shutil.rmtree(leftover, ignore_errors=True)
    done = encode(
        full=update,
        reference=model,
        out=message,
        encoding=settings.encoding,
        residual_out=after,
        density=settings.sparse_density,
        patterns=patterns,
        norms=norms,
    )
    keep_residual(state, round, done.residual_sha256)
    shutil.rmtree(update)
    message.rename(update)
    return done


def unsent(state: Path, round: int, settings: TrainingSettings, *, masked: bool = False) -> Path | None:
    """The residual of messages before `round`: a checkpoint of the tensors concerned; None if there is none."""
    found = latest_before(_home(state), round) if masked or settings.encoding != "full" else None
    return found if found is not None and any(found.glob("*.safetensors")) else None


def residual_path(state: Path, round: int) -> Path:
    """Where what `round` left unsent is kept."""
    return _home(state) / f"round-{round}"


def keep_residual(state: Path, round: int, known: Mapping[str, str] | None = None) -> None:
    """Seal what `round` left unsent, and remove those of rounds before, but the last: it is needed if this round is
    repeated. `known`: digests of files hashed as they were written."""
    if (directory := residual_path(state, round)).is_dir():
        seal(directory, known)
    kept = by_round(_home(state))
    for number in sorted(number for number in kept if number < round)[:-1]:
        shutil.rmtree(kept[number], ignore_errors=True)


def _home(state: Path) -> Path:
    return Path(state) / "residual"
