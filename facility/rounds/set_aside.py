"""Discards what a facility kept of rounds that `crossfed rewind` set aside: no later round may continue from it.

A facility that takes part in the first repeated round replaces it. One that misses that round, and perhaps all others,
would continue with optimizer state, a residual and local parameters of models that are not ancestors of the one it
receives. So each model names the rewinds of its run, and the state names those that it has seen. A finished update
goes with what its round left: handed over later, it would be of a round that the next one cannot continue from.
"""

from __future__ import annotations

from pathlib import Path

from facility.exchange.files.durable import write_json
from facility.exchange.json_values import values_in
from facility.exchange.messages.manifest import Manifest
from facility.exchange.messages.set_aside import set_aside
from facility.rounds.finished import Finished
from facility.rounds.kept import OF_A_ROUND
from facility.rounds.sealed import discard_sealed

NAME = "set_aside.json"
"""In the state: the rewinds that it has seen."""
PLACES = ("", "residual", "personal")
"""Folders of the state that hold a directory a round."""


def forget_set_aside(state: Path, received: Manifest, *, done: int = -1) -> list[Path]:
    """Remove what is kept of rounds that were set aside since this facility's latest job; returns those directories.

    `done`: a round of the present run whose update is kept, and with it what it left: that, and what was before, stays.
    """
    every, known = set_aside(received), _seen(state)
    new = [first for name, first in every.items() if name not in known]
    if not new:
        return []
    first = max(min(new), done + 1)
    places = [path for folder in PLACES for path in sorted((state / folder).glob("*-*"))]
    gone = [path for path in places if (found := OF_A_ROUND.fullmatch(path.name)) and int(found[1]) >= first]
    gone += Finished(state).of_rounds_from(first)
    for path in gone:
        discard_sealed(path)
    state.mkdir(parents=True, exist_ok=True)
    write_json(state / NAME, sorted({*known, *every}))
    return gone


def _seen(state: Path) -> set[str]:
    try:
        return {str(name) for name in values_in(state / NAME)}
    except (OSError, ValueError, TypeError):
        return set()
