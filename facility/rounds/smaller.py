"""An update written as the difference to the model it started from, before it travels.

What the encoding loses stays under the facility's state directory and is added to the next round's difference.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from facility.exchange.delta import Encoded, encode
from facility.exchange.patterns import Patterns
from facility.exchange.settings import TrainingSettings

PREFIX = "round-"


def make_smaller(
    update: Path, *, model: Path, state: Path, round: int, settings: TrainingSettings, patterns: Patterns
) -> Encoded | None:
    """Replace the directory `update` by its message in `settings.encoding`; None where that is `full`."""
    if settings.encoding == "full":
        return None
    home = Path(state) / "residual"
    kept = {
        int(p.name.removeprefix(PREFIX)): p for p in home.glob(f"{PREFIX}*") if p.name.removeprefix(PREFIX).isdigit()
    }
    before = max((number for number in kept if number < round), default=None)
    after, message = home / f"{PREFIX}{round}", update.with_name(f".{update.name}.message")
    for leftover in (after, message):  # of an earlier attempt at the same round
        shutil.rmtree(leftover, ignore_errors=True)
    done = encode(
        full=update,
        reference=model,
        out=message,
        encoding=settings.encoding,
        residual_in=None if before is None else kept[before],
        residual_out=after,
        density=settings.sparse_density,
        patterns=patterns,
    )
    shutil.rmtree(update)
    message.rename(update)
    for number, path in kept.items():
        if before is not None and number < before:
            shutil.rmtree(path, ignore_errors=True)
    return done
