"""`crossfed explain`: which of its three subjects the words name, a facility, a round or a settings key."""

from __future__ import annotations

from pathlib import Path

from coordinator.archive.rounds import Archive
from coordinator.config.federation import Federation, read_federation
from coordinator.config.locate import find_federation
from coordinator.config.reference import explain_key, key_tree
from coordinator.report.explain import explain_facility, explain_round
from facility.exchange.errors import InputError


def explain_words(words: list[str], file: Path | None = None) -> str:
    """The text to print. Raises `InputError` for what is none of the three."""
    match words:
        case []:
            if file is not None:
                raise InputError("--federation has no effect without a facility or `round N`: leave it out")
            return key_tree()
        case ["round", number]:
            if not number.isdecimal():
                raise InputError(f"round {number!r} is not a number, expected for instance `crossfed explain round 3`")
            return explain_round(read_federation(file or find_federation()), int(number))
        case ["facility", name]:
            return _facility(read_federation(file or find_federation()), name)
        case [word]:
            return _key_or_facility(word, file)
        case _:
            raise InputError(f"found {' '.join(words)!r}, expected a facility, `round N` or a settings key")


def _key_or_facility(word: str, file: Path | None) -> str:
    try:
        text = explain_key(word)
    except InputError as error:
        unknown = error
    else:
        if file is None:
            return text
        meant = f"leave it out, or give `facility {word}` for a facility of this name"
        raise InputError(f"--federation has no effect with the settings key {word}: {meant}")
    try:
        found = file or find_federation()
    except InputError as error:
        raise InputError(f"{unknown}; as a facility's name it needs a federation: {error}") from None
    try:
        federation = read_federation(found)
    except InputError as error:
        raise InputError(f"{unknown}; the federation's facilities are not known: {error}") from None
    if not _has_or_had(federation, word):
        hint = f"; `crossfed explain round {word}` explains a round" if word.isdecimal() else ""
        raise InputError(f"{unknown}; the facilities are {', '.join(federation.names)}{hint}") from None
    return _explained(federation, word)


def _has_or_had(federation: Federation, name: str) -> bool:
    """Whether a facility of that name is in federation.yml, or in a round of the archive."""
    if name in federation.names:
        return True
    return any(row.facility == name for entry in Archive(federation.archive_path).history() for row in entry.facilities)


def _explained(federation: Federation, name: str) -> str:
    """A facility's standing, and how many steps its jobs take where those are not `training.steps`."""
    text = explain_facility(federation, name)
    if name not in federation.names:
        return f"{text}\n  It has left: federation.yml has no facility of this name any more."
    if not federation.elastic:
        return text
    from coordinator.steps.outlook import explained

    return "\n".join([text, *explained(federation, name)])


def _facility(federation: Federation, name: str) -> str:
    """A facility's standing. Raises `InputError` where the federation has none of that name, and had none."""
    if not _has_or_had(federation, name):
        raise InputError(f"there is no facility {name!r}; the facilities are {', '.join(federation.names)}")
    return _explained(federation, name)
