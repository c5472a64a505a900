"""Models and rosters of jobs that are not over: no request alters them. And nothing of a job's is read as if sent.

A job compares the signed manifest as it begins, and its ranks read the model's files after that, minutes later or in
several places. Behind a gate nobody but the coordinator's requests can exchange them in between.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from facility.exchange.files.locks import take_lock
from facility.gating import queue
from facility.gating.confine import confine_below, confine_path
from facility.gating.ledger import JobEntry, ledger_locked, read_ledger
from facility.gating.refusal import Refused
from facility.gating.session import Session

MOST_LINKS = 100
"""In a model: the ledger holds where they lead, and is written for all that leaves."""

EXCHANGED = "a link in the model {}, or its roster, was exchanged while its job was approved"


def confined_source(word: str, session: Session) -> Path:
    """A path, without links, whose content a command is to read. Raises `Refused` for one of a job's."""
    path = confine_path(word, session.workdir, follow=True)
    check_sent([str(path)], session)
    return path


def check_sent(places: Iterable[str], session: Session) -> None:
    """Raise `Refused` for what a job printed or keeps: it was not sent by the coordinator, which may not read it.

    What cannot be parsed is quoted in a reason. Of a file that was overwritten all around a line, that is the line.
    """
    directories = [job.directory for job in read_ledger(session.ledger).jobs if job.id]
    for place in map(Path, places):
        if found := next((one for one in directories if place.is_relative_to(one)), None):
            raise Refused(f"{place} lies in a job's directory, {found}: what is read for a job was sent for it")


def reads_of(session: Session, model: Path, roster: Path | None) -> list[str]:
    """What a job reads of what was sent for it, as `places_of` has it. Raises `Refused` for what is, or holds, a job's:
    it compares all files of a model with their digests, and says of one whether it has them."""
    places = list(dict.fromkeys([*places_of(model), *(places_of(roster) if roster is not None else [])]))
    check_sent(places, session)
    for job in read_ledger(session.ledger).jobs:
        if job.id and (place := next((one for one in places if Path(job.directory).is_relative_to(one)), "")):
            raise Refused(f"{place} holds the directory of a job, {job.directory}: all in it is compared with digests")
    return places


def places_of(model: Path) -> list[str]:
    """What a job reads of a model, or of a roster: its directory, the files elsewhere that links in it lead to, and
    links on the way.

    Raises `Refused` for more than `MOST_LINKS` of them, and for a link that leads in a circle.
    """
    found = [str(model)]
    for folder, directories, files in os.walk(model, followlinks=True):  # a circle has more links than may be
        for one in (f"{folder}/{name}" for name in [*directories, *files]):
            if os.path.islink(one):
                found += [*_links_on(one), os.path.realpath(one)]
        if len(found) > MOST_LINKS:
            raise Refused(f"the model holds more than {MOST_LINKS} links, expected files")
    return list(dict.fromkeys(found))


def _links_on(path: str) -> list[str]:
    """Every link that is followed to open an absolute path, each where it lies itself: with another in its place the
    path leads elsewhere. Raises `Refused` for a circle."""
    links: list[str] = []
    here, parts = "/", path.split("/")
    while parts:
        part = parts.pop(0)
        if part in ("", "."):
            continue
        here = os.path.dirname(here) if part == ".." else os.path.join(here, part)
        if os.path.islink(here):
            links.append(here)
            if len(links) > MOST_LINKS:
                raise Refused(f"{path} leads over more than {MOST_LINKS} links, expected files")
            target = os.readlink(here)
            here, parts = "/" if target.startswith("/") else os.path.dirname(here), [*target.split("/"), *parts]
    return links


def check_places(session: Session, job: JobEntry, model: Path, roster: Path | None) -> None:
    """Raise `Refused`, and drop the job, where its model or roster is not read from what the ledger holds for it, or
    what it prints would go elsewhere.

    A link may have been exchanged after it was looked at, before the ledger said that a job reads there.
    """
    try:
        reason = "" if reads_of(session, model, roster) == job.reads else EXCHANGED.format(model)
    except Refused as error:
        reason = str(error)
    try:
        check_no_link(Path(job.directory))
    except Refused as error:
        reason = str(error)
    if not reason:
        return
    with ledger_locked(session.ledger) as (ledger, _):
        ledger.jobs = [entry for entry in ledger.jobs if entry.id != job.id]
    raise Refused(reason)


def check_no_link(directory: Path) -> None:
    """Raise `Refused` for a job's directory that is, lies behind, or holds a link."""
    if found := link_in(directory):
        raise Refused(f"{found} is a link, and a job's directory holds none: what a job leaves would go where it leads")


def link_in(directory: Path) -> str:
    """The directory of a job where it is, or lies behind, a link; else the first link in it, '' without any."""
    if os.path.realpath(directory) != str(directory):
        return str(directory)
    names = (os.path.join(folder, one) for folder, inner, files in os.walk(directory) for one in [*inner, *files])
    return next(filter(os.path.islink, names), "")


def check_no_job(path: Path, session: Session) -> None:
    """Raise `Refused` where a link at this path would lie in a job's directory, or lead there instead of it.

    A scheduler writes what a job prints by a name that is known ahead. Behind a link it would not be a job's output, of
    which neither bytes nor a checksum are given away.
    """
    for job in read_ledger(session.ledger).jobs:
        place = Path(job.directory)
        if job.id and (path.is_relative_to(place) or place.is_relative_to(path)):
            raise Refused(f"{path} is, holds or lies in the directory of job {job.id}, into which no link is made")


@contextmanager
def paths_alone(session: Session) -> Iterator[None]:
    """Nobody else's request changes what a path leads to between its check and its use."""
    path = session.state / "paths.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        take_lock(lock, path)
        yield
    finally:
        os.close(lock)


class Target:
    """What one request writes. `check` again before each write: a job that reads there may have come since."""

    def __init__(self, word: str, session: Session) -> None:
        self.word, self.session = word, session
        self.seen = _version(session.ledger)
        self.path = confined_target(word, session)

    def check(self) -> None:
        """Raise `Refused` where a job reads there by now, or the path leads elsewhere."""
        if (now := _version(self.session.ledger)) != self.seen:
            if confined_target(self.word, self.session) != self.path:
                raise Refused(f"{self.word} leads elsewhere than when the request began")
            self.seen = now


def _version(ledger: Path) -> tuple[int, int] | None:
    """Differs once the file was written again."""
    try:
        return (found := ledger.stat()).st_ino, found.st_mtime_ns
    except FileNotFoundError:
        return None


def confined_target(word: str, session: Session) -> Path:
    """A path below the workdir that may be written or removed. Raises `Refused` where a job reads a model there."""
    path = confine_below(word, session.workdir)
    if _held(path, read_ledger(session.ledger).jobs) is None:
        return path
    queue.note_ends(session)
    if (job := _held(path, read_ledger(session.ledger).jobs)) is not None:
        raise Refused(f"{path} is, holds or lies in the model of job {job.id}, which is not over: it stays as it is")
    return path


def _held(path: Path, jobs: Iterable[JobEntry]) -> JobEntry | None:
    """The job that has not ended and reads there."""
    for job in jobs:
        if job.id and not job.ended:
            for place in map(Path, job.reads):
                if path == place or path.is_relative_to(place) or place.is_relative_to(path):
                    return job
    return None
