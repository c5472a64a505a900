"""Whether a start may proceed with a changed federation.yml, and how the archive records the change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.archive.rounds import CHANGES, Archive
from coordinator.config.described import digest_of
from coordinator.rounds.changes import Change, changes_of
from facility.exchange.errors import InputError

NOTE = "federation"
"""Note of the archive: the description that its latest round was run under."""
ACCEPTED = "accepted"
"""Note of the archive: the digest of a description whose changes were accepted."""


def changes_since(archive: Archive, described: Mapping[str, Any]) -> list[Change]:
    """What differs from the latest start; [] before the first complete round, when nothing was made yet.

    Raises `InputError` for what no round could go on with.
    """
    before = archive.read_note(NOTE)
    done = len(archive.rounds())
    if not (described and done):
        return []
    changes = changes_of(before, described, done=done) if before else [_unknown(archive)]
    if refused := [str(change) for change in changes if not change.possible]:
        raise InputError(f"federation.yml has changed since the archive's latest round: {'; '.join(refused)}")
    return changes


def _unknown(archive: Archive) -> Change:
    """What a start says where the description of earlier rounds was removed, and so cannot be compared."""
    return Change(
        key=f"{NOTE}.json",
        before=None,
        now="written anew",
        follows=f"it is missing in {archive.path.name}, so what has changed since the latest round is not known",
        affects=False,
    )


def is_accepted(archive: Archive, described: Mapping[str, Any], changes: Sequence[Change]) -> bool:
    """True where no change makes later models differ, or where `accept` was said to just these."""
    wanted = archive.read_note(ACCEPTED).get("digest")
    return not any(change.affects for change in changes) or wanted == digest_of(described)


def accept(archive: Archive, described: Mapping[str, Any]) -> None:
    """Note that the changes up to this description are accepted: `crossfed run --accept`."""
    archive.write_note(ACCEPTED, {"digest": digest_of(described)})


def refusal(changes: Sequence[Change]) -> InputError:
    """The error that names changes which were not accepted, and how to accept them."""
    listed = "; ".join(f"({number}) {change}" for number, change in enumerate(changes, 1))
    return InputError(
        f"federation.yml has changed since the archive's latest round, and later models will differ: {listed}. Go on "
        "with `crossfed run --accept`, or undo the change"
    )


def take_over(archive: Archive, described: Mapping[str, Any]) -> list[Change]:
    """Go on under this description. Raises `InputError` for changes that affect results and were not accepted."""
    changes = changes_since(archive, described)
    if not is_accepted(archive, described, changes):
        raise refusal(changes)
    waiting = _taken_over(archive)
    if every := list(dict.fromkeys([*waiting, *map(str, changes)])):
        note = {"round": len(archive.rounds()), "told": every, "before": waiting, "under": digest_of(described)}
        archive.write_note(CHANGES, note)
    else:
        archive.drop_note(CHANGES)
    if described:
        archive.write_note(NOTE, dict(described))
    archive.drop_note(ACCEPTED)
    return changes


def unrecorded_changes(archive: Archive) -> list[str]:
    """The changes that are not yet in a round's file: a commit that is killed leaves the note of those that are."""
    note, following = archive.read_note(CHANGES), len(archive.rounds())
    return [str(one) for one in note.get("told", [])] if note.get("round", following) == following else []


def _taken_over(archive: Archive) -> list[str]:
    """Of the changes that are not yet in a round's file, those that a start went on under: one that was killed before
    it took the description over has reported changes that may have been undone since, or are found anew."""
    note = archive.read_note(CHANGES)
    killed = "under" in note and note["under"] != digest_of(archive.read_note(NOTE))
    now = unrecorded_changes(archive)
    return [str(one) for one in note.get("before", [])] if killed and now else now


def drop_recorded_changes(archive: Archive) -> None:
    """Forget the note of changes, which are in a round's file now."""
    archive.drop_note(CHANGES)
