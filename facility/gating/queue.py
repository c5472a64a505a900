"""Jobs in the site's queue: submitted, asked about and cancelled by fixed argument lists, ours alone."""

from __future__ import annotations

import getpass
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from facility.exchange.errors import TransientError
from facility.exchange.job_names import MARK
from facility.gating.grammar import Request
from facility.gating.ledger import RESERVED, ledger_locked, read_ledger
from facility.gating.policy import Policy
from facility.gating.refusal import Refused
from facility.gating.session import Session

OUTPUT_BYTES = 1 << 16
SECONDS = 120
GRACE_SECONDS = 20
"""Time from SIGTERM to SIGKILL."""
SPARE_SECONDS = 5.0
"""By which a gate is earlier to end what runs on its host."""
UNANSWERED = 124
"""Exit code that stands for a program which did not answer in time."""
OUTPUT = "crossfed-job.log"


@dataclass(frozen=True, kw_only=True)
class Commands:
    """Argument lists of one scheduler; USER, NAME, ID, IDS (one word each), LIST (joined by commas), NODES, LIMIT,
    SECONDS and DIRECTORY stand for values."""

    submit: tuple[str, ...]
    dry: tuple[str, ...] = ()
    """Tests a job without submitting it; none: only the program's presence is tested."""
    listing: tuple[tuple[str, ...], ...]
    """One after the other; the last's exit code counts."""
    found: tuple[str, ...] = ()
    """Prints ids, one a line, that are given to the listing as IDS."""
    active: tuple[str, ...]
    """Prints the ids of jobs that have not ended."""
    waiting: tuple[str, ...]
    """Prints those that have not begun."""
    cancel: tuple[str, ...]
    states: tuple[str, ...]
    ending: tuple[tuple[str, ...], ...]
    """Tried in turn until one exits with 0."""
    begins: tuple[str, ...] = ()
    """Prints when a waiting job is expected to begin; none: this scheduler does not say."""
    id: str = r"\d[\w.\[\]@-]*"


FLUX_ENDING = "{id} {returncode} {status} {result} {exception.type} {exception.note}"

TABLE = {
    "slurm": Commands(
        submit=("sbatch", "--parsable", "--chdir=DIRECTORY", "--job-name=NAME", "--nodes=NODES", "--time=LIMIT"),
        dry=("sbatch", "--test-only", "--nodes=NODES", "--time=LIMIT"),
        listing=(("squeue", "-h", "-u", "USER", "-n", "NAME", "-o", "%i %T %r"),),
        active=("squeue", "-h", "-u", "USER", "-n", "NAME", "-o", "%i"),
        waiting=("squeue", "-h", "-u", "USER", "-n", "NAME", "-t", "PENDING", "-o", "%i"),
        cancel=("scancel", "IDS"),
        begins=("env", "SLURM_TIME_FORMAT=%Y-%m-%dT%H:%M:%S%z", "squeue", "-h", "-j", "ID", "-o", "%S"),
        states=("squeue", "-h", "-t", "all", "-o", "%i %T", "-j", "LIST"),
        ending=(
            ("scontrol", "show", "-o", "job", "ID"),
            ("sacct", "-X", "-n", "-P", "-o", "State,ExitCode", "-j", "ID"),
        ),
    ),
    "pbs": Commands(
        submit=("qsub", "-N", "NAME", "-l", "walltime=LIMIT", "-j", "oe", "-o", f"DIRECTORY/{OUTPUT}"),
        listing=(("qstat", "-f", "-F", "json", "IDS"),),
        found=("qselect", "-u", "USER", "-N", "NAME"),
        active=("qselect", "-u", "USER", "-N", "NAME"),
        waiting=("qselect", "-u", "USER", "-N", "NAME", "-s", "QHW"),
        cancel=("qdel", "IDS"),
        begins=("qstat", "-f", "-Fjson", "ID"),
        states=("qstat", "-f", "-Fjson", "IDS"),
        ending=(("qstat", "-xf", "-Fjson", "ID"),),
    ),
    "flux": Commands(
        submit=("flux", "batch", "--cwd=DIRECTORY", "--job-name=NAME", "--nodes=NODES", "--time-limit=SECONDSs"),
        listing=(
            (
                "flux",
                "jobs",
                "-n",
                "-f",
                "pending,running",
                "--name=NAME",
                "-o",
                "{id} {state} urgency={urgency} queue={queue} {dependencies}",
            ),
            ("flux", "queue", "status"),
        ),
        active=("flux", "jobs", "-n", "-f", "pending,running", "--name=NAME", "-o", "{id}"),
        waiting=("flux", "jobs", "-n", "-f", "pending", "--name=NAME", "-o", "{id}"),
        cancel=("flux", "cancel", "IDS"),
        states=("flux", "jobs", "-n", "-o", FLUX_ENDING, "IDS"),
        ending=(("flux", "jobs", "-n", "-o", FLUX_ENDING, "ID"),),
        id=r"[fƒ]\w+",
    ),
}


def fill_words(form: Sequence[str], values: dict[str, str], ids: Sequence[str] = ()) -> list[str]:
    """An argument list with its values in place, each within one word."""
    pattern = re.compile("|".join(sorted(values, key=len, reverse=True)) or r"(?!)")
    result: list[str] = []
    for word in form:
        result += list(ids) if word == "IDS" else [pattern.sub(lambda found: values[found[0]], word)]
    return result


def values_of(policy: Policy, *, name: str = "", directory: str = "") -> dict[str, str]:
    """Values of the words in capitals of a scheduler's command; all come from the policy, none from a request."""
    seconds = round(policy.hours * 3600)
    limit = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return {
        "USER": getpass.getuser(),
        "NAME": name,
        "NODES": str(policy.nodes),
        "LIMIT": limit,
        "SECONDS": str(seconds),
        "DIRECTORY": directory,
    }


def run_program(command: Sequence[str], text: str | None = None, cwd: Path | None = None) -> tuple[int, str]:
    """Run a program of the site's without a shell; returns its code and all that it printed."""
    try:
        result = subprocess.run(
            command,
            input=None if text is None else text.encode(),
            stdin=subprocess.DEVNULL if text is None else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            cwd=cwd,
        )
    except (FileNotFoundError, PermissionError):  # the latter where a folder of PATH may not be read
        return 127, f"there is no {command[0]} command on this gate's PATH ({os.environ.get('PATH', '')})\n"
    except subprocess.TimeoutExpired:
        return UNANSWERED, f"{command[0]} did not answer within {SECONDS} s\n"
    return result.returncode, result.stdout.decode(errors="replace")


def scheduler_commands(session: Session) -> Commands:
    """Commands of the site's scheduler. Raises `Refused` where it has no queue."""
    if session.policy.scheduler not in TABLE:
        raise Refused(f"this site's scheduler is {session.policy.scheduler}, which has no queue to ask")
    return TABLE[session.policy.scheduler]


def our_name(session: Session, name: str) -> str:
    """The name, if jobs of this gate have it; else raises `Refused`."""
    if name not in session.names():
        raise Refused(f"jobs are called {name!r:.100}, ours here are {', '.join(session.names())}")
    return name


def our_ids(session: Session, ids: Sequence[str]) -> list[str]:
    """The ids, if all are of jobs submitted through this gate; else raises `Refused`."""
    ledger = read_ledger(session.ledger)
    if foreign := [id for id in ids if ledger.job(id) is None]:
        raise Refused(f"job {foreign[0]} was not submitted through this gate")
    return list(ids)


def ids_of(session: Session, form: Sequence[str], name: str) -> tuple[int, list[str], str]:
    """(exit code, ids, all that was printed) of a command that lists jobs of a name."""
    code, text = run_program(fill_words(form, values_of(session.policy, name=name)))
    return code, [word for word in text.split() if re.fullmatch(TABLE[session.policy.scheduler].id, word)], text


def jobs(session: Session, request: Request) -> int:
    """Print our jobs of a name as the scheduler lists them; returns its exit code."""
    name = our_name(session, request["name"])
    if session.policy.scheduler == "ssh":
        for pid in processes(name):
            print(f"{pid} R")
        return 0
    commands = scheduler_commands(session)
    name_found(session, name)
    ids: list[str] = []
    if commands.found:
        code, ids, text = ids_of(session, commands.found, name)
        if code or not ids:
            sys.stdout.write(text if code else "")
            return code
    code = 0
    for form in commands.listing:
        code, text = run_program(fill_words(form, values_of(session.policy, name=name), ids))
        sys.stdout.write(text)
    return code


def name_found(session: Session, name: str) -> None:
    """Enter the id of a job of this name whose gate was killed before it could: its coordinator learns it by `jobs`."""
    if not any(job.unnamed(name) for job in read_ledger(session.ledger).jobs):
        return
    _, there, _ = ids_of(session, scheduler_commands(session).active, name)
    with ledger_locked(session.ledger) as (ledger, _):
        unknown = [id for id in there if ledger.job(id) is None]
        waiting = [job for job in ledger.jobs if job.unnamed(name)]
        found = list(zip(unknown, reversed(waiting), strict=False))  # the last to be entered is there
        for id, job in found:
            job.id = id
    for id, job in found:
        session.write("found", job=id, name=name, directory=job.directory)


def cancel(session: Session, request: Request) -> int:
    """All our jobs of a name; with `cancel-waiting` only those that have not begun."""
    name, waiting = our_name(session, request["name"]), request.verb == "cancel-waiting"
    if session.policy.scheduler == "ssh":
        for pid in [] if waiting else processes(name):
            with suppress(ProcessLookupError):  # it ended with one before it
                os.kill(pid, signal.SIGTERM)
        return 0
    commands = scheduler_commands(session)
    code, ids, text = ids_of(session, commands.waiting if waiting else commands.active, name)
    if code or not ids:
        sys.stdout.write(text if code else "")
        return code
    code, text = run_program(fill_words(commands.cancel, {}, ids))
    sys.stdout.write(text)
    return code


def cancel_ids(session: Session, request: Request) -> int:
    """Cancel jobs of ours by their ids; returns the scheduler's exit code."""
    code, text = run_program(fill_words(scheduler_commands(session).cancel, {}, our_ids(session, request.more)))
    sys.stdout.write(text)
    return code


def states(session: Session, request: Request) -> int:
    """Print the states of jobs of ours; returns the scheduler's exit code."""
    ids = our_ids(session, request.more)
    code, text = run_program(fill_words(scheduler_commands(session).states, {"LIST": ",".join(ids)}, ids))
    sys.stdout.write(text)
    return code


def begins(session: Session, request: Request) -> int:
    """Print when a job of ours is expected to begin; nothing where the scheduler does not say."""
    (id,), form = our_ids(session, [request["id"]]), scheduler_commands(session).begins
    code, text = run_program(fill_words(form, {"ID": id})) if form else (0, "")
    sys.stdout.write(text)
    return code


def ending(session: Session, request: Request) -> int:
    """Print how a job of ours ended, by the first of the commands that knows."""
    (id,) = our_ids(session, [request["id"]])
    code = 1
    for form in scheduler_commands(session).ending:
        code, text = run_program(fill_words(form, {"ID": id}))
        sys.stdout.write(text)
        if code == 0:
            break
    return code


def output(session: Session, request: Request) -> int:
    """The end of what a job printed."""
    if not session.policy.job_output:
        raise Refused("what jobs print stays here (job_output in the policy)")
    (id,) = our_ids(session, [request["id"]])
    path = _output_of(session, id)
    if path is None:
        return 1
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - OUTPUT_BYTES))
        session.take_out(min(size, OUTPUT_BYTES))
        sys.stdout.buffer.write(file.read(OUTPUT_BYTES))
    return 0


def _output_of(session: Session, id: str) -> Path | None:
    entry = read_ledger(session.ledger).job(id)
    assert entry is not None  # `our_ids` found it
    directory = Path(entry.waited_in or entry.directory)
    places = [directory / OUTPUT, directory / f"slurm-{id}.out", directory / f"flux-{id}.out"]
    places += [] if entry.waited_in else sorted(directory.glob("*.log"))
    return next((path for path in places if path.is_file() and not path.is_symlink()), None)


def note_ends(session: Session) -> None:
    """Note which of our jobs are over, so that they count with what they used: on a host without a queue by its
    processes. Those that a gate was about to submit, or to run, when it was killed are over once nothing of their name
    is left."""
    scheduler = session.policy.scheduler
    under_way = [job for job in read_ledger(session.ledger).jobs if job.id and not job.ended]
    known = {job.id for job in under_way if not job.id.startswith(RESERVED)}
    for name in [one for one in session.names() if one in {job.name for job in under_way}]:
        if scheduler == "ssh":
            code, there = 0, [str(pid) for pid in processes(name)]
        else:
            code, there, _ = ids_of(session, TABLE[scheduler].active, name)
        if code:
            continue
        with ledger_locked(session.ledger) as (ledger, now):
            ledger.note_ended(name, known, there, now)
            if not there:
                ledger.note_killed(name, now)


def submit_script(session: Session, script: str, name: str, directory: Path) -> str:
    """Submit a script of the site's own making; returns the job's id. Raises `Refused` with the scheduler's words, and
    `TransientError` where it did not answer: the job may be there."""
    commands = scheduler_commands(session)
    command = fill_words(commands.submit, values_of(session.policy, name=name, directory=str(directory)))
    code, text = run_program(command, text=script, cwd=directory)
    ids = [word.split(";")[0] for word in text.split() if re.fullmatch(commands.id, word.split(";")[0])]
    if code == UNANSWERED:
        raise TransientError(text.strip())
    if code or not ids:
        raise Refused(f"{command[0]} took no job (code {code}): {' '.join(text.split())[-300:]}")
    return ids[-1]


def processes(name: str) -> list[int]:
    """Processes of ours that carry the name in their environment."""
    mark, found = f"{MARK}={name}".encode(), []
    for place in Path("/proc").iterdir():
        try:
            if place.name.isdigit() and mark in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def on_this_host(session: Session, script: str, name: str, directory: Path, *, seconds: float = 0.0) -> int:
    """Run a script here until it ends, its time is over (0: a job's), or the connection is gone.

    `timeout` ends it as well: a gate that was killed ends nothing.
    """
    seconds = seconds or session.policy.hours * 3600
    process = subprocess.Popen(
        ["timeout", f"--kill-after={GRACE_SECONDS}", f"{seconds + SPARE_SECONDS:.3f}", "bash", "-s"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=directory,
        env=os.environ | {MARK: name},
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(script.encode())
    process.stdin.close()
    ended = threading.Event()

    def end(hard: bool = False) -> None:
        try:
            os.killpg(process.pid, signal.SIGKILL if hard else signal.SIGTERM)
        except ProcessLookupError:
            pass

    # Not the buffer's own `read`: its lock, held by a thread that waits, aborts the interpreter at its end.
    source = getattr(sys.stdin.buffer, "raw", sys.stdin.buffer)

    def tether() -> None:
        while source.read(1):
            pass
        if not ended.is_set():
            end()
            if not ended.wait(GRACE_SECONDS):
                end(hard=True)

    limit = threading.Timer(seconds, end)
    limit.daemon = True
    limit.start()
    threading.Thread(target=tether, daemon=True).start()
    tail = b""
    while block := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
        tail = (tail + block)[-OUTPUT_BYTES:]
    code = process.wait()
    ended.set()
    limit.cancel()
    sys.stdout.buffer.write(tail if session.policy.job_output else b"")
    sys.stdout.flush()
    return code if code >= 0 else 128 - code
