"""Going back in the archive: later rounds are set aside, never deleted, and the same command goes on from there."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from coordinator.archive.journal import Journal
from coordinator.archive.rounds import CHANGES, COMPARED, REWOUND, ROUND, Archive, RoundFile
from facility.exchange.errors import InputError, ManifestError
from facility.exchange.files.durable import fsync_directory
from facility.exchange.messages.comparison import UPDATE_OF
from facility.exchange.messages.manifest import read_manifest, verify_manifest
from facility.exchange.messages.set_aside import set_aside, with_set_aside

ASIDE = "rewound-"
"""Begins the names of folders with rounds that were set aside."""
AGAIN = "begun again by crossfed rewind"
"""Begins what a round's file says of it."""
EVALUATION = "evaluation"
"""Note: what facilities found of the final model."""
MOVING = "moving"
"""Key of the note of a rewind whose rounds are not all set aside yet."""
CANCELLED = "cancelled"
"""Key of it: whether jobs of rounds that were set aside have been looked for (`coordinator.engine.left_jobs`)."""
STATELESS = "from its half-precision model and a fresh server optimizer"
"""Of a round whose float32 master and server optimizer's tensors were gone."""


def rewind(archive: Archive, to: int) -> Path:
    """Make `to` the next round; returns the folder that now holds the rounds from `to` on.

    What was changed in federation.yml for a round that is set aside holds from round `to` on, whose file will say so.
    The caller holds the federation's lock. Raises `InputError` when there is no such round, or when the model that
    round `to` starts from was pruned or is damaged itself.
    """
    finish_rewind(archive)
    done, before = archive.rounds(), archive.read_note(REWOUND)  # there until a round is complete
    if before.get("round") == to == len(done):  # the same command again
        return archive.path / str(before["aside"])
    if not 0 <= to < len(done):
        raise InputError(f"cannot go back to round {to}: {archive.path} holds rounds {_span(done)}")
    model = archive.model_for(to)
    if not model.is_dir():
        kept = [number for number in done if archive.model_for(number).is_dir()]
        raise InputError(f"the model that round {to} starts from was pruned; rounds to go back to are {_span(kept)}")
    try:
        verify_manifest(model)
        if (state := archive.state_for(to)) is not None and state.is_dir():
            verify_manifest(state)
    except ManifestError as error:
        raise ManifestError(f"{error.found}; restore that file from a copy, or go back to another round") from None
    aside = archive.path / f"{ASIDE}{time.strftime('%Y%m%d-%H%M%S')}"
    while aside.exists():  # the second within a second
        aside = aside.with_name(f"{aside.name}-again")
    gone = len(done) - to + (int(before.get("gone", 0)) if before.get("round") == len(done) else 0)
    note = {"round": to, "stateless": lacks_state(archive, to), "gone": gone, "aside": aside.name, CANCELLED: False}
    archive.write_note(REWOUND, note | {MOVING: True})
    _set_aside(archive, note)
    return aside


def finish_rewind(archive: Archive) -> str:
    """Complete a rewind that was killed: what it left of the rounds has no state to go on from. '': none was."""
    note = archive.read_note(REWOUND)
    if not note.pop(MOVING, False):
        return ""
    _set_aside(archive, note)
    return f"crossfed rewind --to {note['round']} was interrupted, and is completed now"


def _set_aside(archive: Archive, note: dict[str, Any]) -> None:
    """Move the rounds that the note of a rewind says, or those that are left of them."""
    to, aside = int(note["round"]), archive.path / str(note["aside"])
    aside.mkdir(exist_ok=True)
    left = archive.rounds()[to:]
    undone = [*_readable(archive, left), *_readable(Archive(aside), _rounds_in(aside))]
    _keep_changes(archive, to, undone)
    _set_updates_aside(archive, undone, aside)
    for number in reversed(left):  # the last first: killed in between, the archive has no gap
        archive.round_directory(number).rename(aside / archive.round_directory(number).name)
    with suppress(FileNotFoundError):
        (archive.path / f"{EVALUATION}.json").rename(aside / f"{EVALUATION}.json")
    for name in ("stopped", "attempts", "comparison", "reopened"):
        archive.drop_note(name)
    archive.write_history()
    Journal(archive.path).append("rewound", time=time.time(), round=to)
    fsync_directory(archive.path)
    archive.write_note(REWOUND, note)


def _readable(archive: Archive, numbers: list[int]) -> list[RoundFile]:
    """The files of these rounds; going back is the way out where one is damaged."""
    found = []
    for number in numbers:
        with suppress(InputError):
            found.append(archive.read_round(number))
    return found


def _keep_changes(archive: Archive, to: int, undone: list[RoundFile]) -> None:
    """Let round `to` record the changes that rounds from it on were run under, and those that none records yet."""
    note = archive.read_note(CHANGES)
    waiting = note.get("told", []) if note.get("round") in (to, len(archive.rounds())) else []
    every = dict.fromkeys([*(text for entry in undone for text in entry.changes), *map(str, waiting)])
    told = [text for text in every if not text.startswith(AGAIN)]  # `rewind_remarks` says it of this round
    if told and to:
        archive.write_note(CHANGES, {"round": to, "told": told})
    else:  # before the first round there is nothing that was made under other settings
        archive.drop_note(CHANGES)


def _set_updates_aside(archive: Archive, undone: list[RoundFile], aside: Path) -> None:
    """Updates that are kept to be compared and were of these rounds: no facility's last one that counted any more."""
    for name in sorted({row.facility for entry in undone for row in entry.facilities if row.status == "ok"}):
        update = archive.compared / f"{UPDATE_OF}{name}"
        if update.is_dir():
            (aside / COMPARED).mkdir(exist_ok=True)
            update.rename(aside / COMPARED / update.name)


def rewinds(archive: Archive) -> dict[str, int]:
    """The first round that each rewind has set aside, by its folder's name, as the folders say that are still there."""
    return {aside.name: min(numbers) for aside, numbers in _folders(archive).items()}


def count_set_aside(archive: Archive) -> int:
    """How many rounds were set aside and are still there, by all rewinds; reads none of them."""
    return sum(map(len, _folders(archive).values()))


def rounds_set_aside(archive: Archive) -> list[RoundFile]:
    """The files of all rounds that were set aside and are still there, the first rewind's first."""
    folders = _folders(archive).items()
    return [one for aside, numbers in folders for one in _readable(Archive(aside), numbers)]


def evaluations_set_aside(archive: Archive) -> list[dict[str, Any]]:
    """The notes of final evaluations that were set aside and are still there, the first rewind's first."""
    found = []
    for aside in _folders(archive):
        with suppress(InputError):
            found.append(Archive(aside).read_note(EVALUATION))
    return found


def _folders(archive: Archive) -> dict[Path, list[int]]:
    """What rewinds left: folders in the order of their names, with the numbers of their rounds, one at least."""
    folders = sorted(archive.path.glob(f"{ASIDE}*"))
    return {aside: numbers for aside in folders if (numbers := _rounds_in(aside))}


def _rounds_in(aside: Path) -> list[int]:
    """Numbers of the rounds in a rewind's folder, ascending; they need not begin at 0."""
    return sorted(int(match[1]) for path in aside.glob("*") if (match := ROUND.fullmatch(path.name)))


def write_rewinds(archive: Archive, base: Path, *directories: Path | None) -> None:
    """Say in models or messages which rounds of their run were set aside: what facilities keep of them is of no use.

    `base`: a model of the same run, which says it of folders that a person has removed since. `directories`: those
    that there are.
    """
    every = set_aside(read_manifest(base)) | rewinds(archive)
    for directory in directories:
        if every and directory is not None and directory.is_dir():
            with_set_aside(directory, every)


def lacks_state(archive: Archive, to: int) -> bool:
    """True if round `to` starts from a model whose float32 master and server optimizer's tensors are gone.

    The archive keeps those of the newest round. Without them the master is the half-precision model itself, and the
    server optimizer starts afresh.
    """
    return to > 0 and not (archive.round_directory(to - 1) / "state").is_dir()


def rewind_remarks(archive: Archive, number: int) -> list[str]:
    """What the file of a round that comes after a rewind says of that."""
    if archive.read_note(REWOUND).get("round") != number:
        return []
    how = f", {STATELESS}" if archive.state_for(number) is None and number else ""
    return [f"{AGAIN}{how}"]


def _span(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
