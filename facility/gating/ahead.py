"""Jobs that are in the site's queue before their model (`submit_ahead`): submitted, given a round, accounted for.

The job waits in a directory of the gate's own, which no request can write. What it then runs is the gate's own line,
made of a round that was approved like any other at that moment; `facility.exchange.messages.ahead` has the agreement.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import sys
import time
from pathlib import Path

from facility.exchange.messages.ahead import BEGAN, COMMAND, GIVEN_UP, MOST_BYTES, WAITED
from facility.gating.approval import Approved, approve_job
from facility.gating.grammar import Request
from facility.gating.held import EXCHANGED, check_no_link, confined_source, paths_alone, reads_of
from facility.gating.jobs import (
    clear_update,
    job_command,
    job_directory,
    leave_reason,
    render_script,
    reserve_job,
    submit_job,
)
from facility.gating.ledger import DAY, ledger_locked, read_ledger
from facility.gating.queue import our_ids, scheduler_commands
from facility.gating.refusal import Refused
from facility.gating.session import Session
from facility.gating.settings_copy import settings_copy

FOLDER = "ahead"
"""Below the gate's own directory."""
NOT_YET = 1
"""Exit code: a job has not said how long it waited, or has decided to end without the round."""


def submit_ahead(session: Session, request: Request) -> int:
    """Submit the site's template with a wait in it, for a federation whose signed orders came here; prints its id."""
    scheduler_commands(session)  # a host without a queue has none to wait in
    seconds, most = int(request["wait"]), session.policy.ahead_seconds
    if not most:
        raise Refused("the policy lets no job wait for its model (ahead_seconds)")
    if seconds > most:
        raise Refused(f"the job would wait {seconds} s for its model, the policy's ahead_seconds is {most:g}")
    with settings_copy(session) as copy:
        with paths_alone(session):
            copy.take(confined_source(request["settings"], session))
        federation = copy.read(session).federation
        copy.check_ordered(session)
    directory = _new_directory(session)
    try:
        job = reserve_job(session, session.waiting_name(federation), directory, waits=True)
        text = render_script(session, waiting(directory, seconds))
        session.write("approved ahead", federation=federation, wait=seconds, node_hours=job.nodes * job.hours)
        print(submit_job(session, text, job))
    except Refused:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return 0


def _new_directory(session: Session) -> Path:
    """For one job; removes those of jobs that are long over."""
    place = session.state / FOLDER
    place.mkdir(mode=0o700, exist_ok=True)
    waiting_in = {job.waited_in for job in read_ledger(session.ledger).jobs if not job.ended}
    for one in place.iterdir():
        if str(one) not in waiting_in and one.lstat().st_mtime < time.time() - DAY:
            shutil.rmtree(one, ignore_errors=True)
    directory = place / secrets.token_hex(8)
    directory.mkdir(mode=0o700)
    return directory


def waiting(directory: Path, seconds: int) -> str:
    """One line of shell: wait for a round in the directory, and run it."""
    place = shlex.quote(str(directory))
    guard = "export PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1"
    wait = f"python3 -m facility.ahead --directory {place} --wait {seconds}"
    return f"cd {place} && export {BEGAN}=$(date +%s) && {guard} && {wait} && . {place}/{COMMAND}"


def hand_over(session: Session, request: Request) -> int:
    """Approve a round as `submit` does, and give it to a job that waits.

    May be asked again for the same directory. Exits with `NOT_YET` where the job has decided to end, or has another
    round. A round that is refused ends the wait.
    """
    directory = job_directory(session, request)
    (id,) = our_ids(session, [request["job"]])
    entry = read_ledger(session.ledger).job(id)
    if entry is None or not entry.waited_in:
        raise Refused(f"job {id} was submitted with its round")
    if entry.directory == str(directory):  # it has it: the answer was lost
        return 0 if _decided(Path(entry.waited_in)) not in ("", GIVEN_UP) else NOT_YET
    try:
        approved = approve_job(session, request)
        if entry.name != session.waiting_name(approved.federation):
            raise Refused(f"job {id} waits for another federation's round")
        clear_update(directory)
        given = _give(session, approved, id, directory)
    except Refused as error:
        leave_reason(session, directory, int(request["round"]), str(error))
        _link(Path(entry.waited_in), GIVEN_UP)
        raise
    if not given:
        return NOT_YET
    session.write("handed over", job=id, directory=str(directory), **approved.logged())
    return 0


def _give(session: Session, approved: Approved, id: str, directory: Path) -> bool:
    """Link the round's command to the name that the job looks for, and let the job's update be read.

    Raises `Refused` where a link in the model was exchanged since it was approved, or one lies in the job's directory.
    """
    text = f"{job_command(session, approved, directory)}\n"
    # The ledger's lock, too: of two rounds one is given, and the ledger says which.
    with paths_alone(session), ledger_locked(session.ledger) as (ledger, _):
        if reads_of(session, approved.model, approved.roster) != approved.reads:
            raise Refused(EXCHANGED.format(approved.model))
        check_no_link(directory)
        entry = ledger.job(id)
        if entry is None or not _link(Path(entry.waited_in), text):
            return False
        entry.directory, entry.run, entry.reads = str(directory), approved.run, approved.reads
    return True


def _link(place: Path, text: str) -> bool:
    """Decide what a waiting job does, unless that is decided already."""
    own = place / f"gate.{os.getpid()}"
    try:
        own.write_text(text, encoding="utf-8")
        own.chmod(0o600)
        os.link(own, place / COMMAND)
    except FileExistsError:
        return False
    except FileNotFoundError:  # the directory of a job that is long over
        return False
    finally:
        own.unlink(missing_ok=True)
    return True


def _decided(place: Path) -> str:
    try:
        return (place / COMMAND).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def waited(session: Session, request: Request) -> int:
    """How long a job waited for its round, as it wrote."""
    (id,) = our_ids(session, [request["id"]])
    entry = read_ledger(session.ledger).job(id)
    path = Path(entry.waited_in) / WAITED if entry is not None and entry.waited_in else None
    if path is None or path.is_symlink() or not path.is_file():
        return NOT_YET
    with open(path, "rb") as file:
        content = file.read(MOST_BYTES)
    session.take_out(len(content))
    sys.stdout.buffer.write(content)
    sys.stdout.flush()
    return 0
