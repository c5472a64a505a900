"""Submit the site's own template: the gate writes the script itself, and takes paths and a round from the request.

A refusal leaves `failure.json` where the update would be, so that the coordinator's table shows the reason.
"""

from __future__ import annotations

import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from facility.exchange.files.audit_log import AUDIT
from facility.exchange.files.durable import new_directory
from facility.exchange.messages import report
from facility.exchange.messages.job_template import Environment, fill_template
from facility.exchange.messages.order import SIGNERS
from facility.exchange.messages.privacy import DATASET_LIMIT
from facility.exchange.messages.template_inheritance import COMMAND, find_template, read_template, script_of
from facility.gating import queue
from facility.gating.approval import Approved, approve_job
from facility.gating.confine import confine_below, refuse_outgoing
from facility.gating.grammar import Request
from facility.gating.held import check_places, confined_target, paths_alone
from facility.gating.ledger import RESERVED, JobEntry, ledger_locked, read_ledger
from facility.gating.refusal import Refused
from facility.gating.search_paths import SHELL
from facility.gating.session import Session
from facility.launching.notes import PLACE as NOTES
from facility.masking.site_rules import MINIMUM_SUM, PEER_SIGNERS

SCRATCH = "scratch"
"""Below the gate's own directory: HOME and TMPDIR of its jobs."""
SPARE_SECONDS = 86400.0
"""How long a job's scratch stays beyond its time limit."""


def submit(session: Session, request: Request) -> int:
    """`submit` prints the job's id; `run` (no queue) runs the job on this host."""
    directory = job_directory(session, request)
    if (session.policy.scheduler == "ssh") != (request.verb == "run"):
        raise Refused(f"{request.verb} was asked for, this site's scheduler is {session.policy.scheduler}")
    try:
        approved = approve_job(session, request)
        clear_update(directory)
        name = session.job_name(approved.federation)
        job = reserve_job(session, name, directory, run=approved.run, reads=approved.reads)
        with paths_alone(session):
            check_places(session, job, approved.model, approved.roster)
        still_reserved(session, job)
    except Refused as error:
        leave_reason(session, directory, int(request["round"]), str(error))
        raise
    text = render_script(session, job_command(session, approved, directory))
    session.write(
        "approved",
        node_hours=job.nodes * job.hours,
        **approved.logged(),
    )
    if request.verb == "run":
        try:
            return queue.on_this_host(session, text, job.name, directory)
        finally:
            with ledger_locked(session.ledger) as (ledger, now):
                if (entry := ledger.job(job.id)) is not None:
                    entry.ended = now
    print(submit_job(session, text, job))
    return 0


def job_directory(session: Session, request: Request) -> Path:
    """Where the job is to run. Raises `Refused` where it does not exist, or lies in another job's.

    Whatever lies in a job's `update` may leave: what another job prints and keeps must not. Nor may it be written, or
    removed for a reason of ours, where another job reads. Of a template's `--output=%x.log` sbatch makes a path by the
    directory, and slurmd replaces every `%x` of it: what a job in `a%x` prints would lie beside its directory.
    """
    directory = refuse_outgoing(confine_below(request["directory"], session.workdir), session.workdir)
    confine_below(request["temporary"], session.workdir)  # the engine's; the job gets one of the gate's own
    if not directory.is_dir() or directory.is_symlink():
        raise Refused(f"the job's directory {directory} does not exist")
    if "%" in str(directory):
        raise Refused(f"the job's directory {directory} holds a %, which a scheduler may replace in a job's output")
    confined_target(request["directory"], session)
    if {str(one) for one in directory.parents} & {job.directory for job in read_ledger(session.ledger).jobs}:
        raise Refused(f"the job's directory {directory} lies in another job's directory")
    return directory


def clear_update(directory: Path) -> None:
    """Remove what lies where a job's update will be: it is none of that job's, and would leave as if it were."""
    update = directory / "update"
    if update.is_symlink() or update.is_file():
        update.unlink()
    else:
        shutil.rmtree(update, ignore_errors=True)


def still_reserved(session: Session, job: JobEntry) -> None:
    """Raise `Refused` where a gate that was taken for a killed one has lost its hours to other jobs meanwhile."""
    with ledger_locked(session.ledger) as (ledger, now):
        entry = ledger.job(job.id)
        if entry is None or entry.ended:
            raise Refused(f"the request took {now - job.submitted:.0f} s, and its node-hours are no longer reserved")


def submit_job(session: Session, text: str, job: JobEntry) -> str:
    """Submit the script of a job that has its entry in the ledger; returns its id. Raises `Refused`, and what
    `submit_script` raises where the job may be there: its entry stays, and is found by its name."""
    try:
        id = queue.submit_script(session, text, job.name, Path(job.directory))
    except Refused:
        with ledger_locked(session.ledger) as (ledger, _):
            ledger.jobs = [entry for entry in ledger.jobs if entry.id != job.id]
        raise
    with ledger_locked(session.ledger) as (ledger, _):
        if (entry := ledger.job(job.id)) is not None:
            entry.id, entry.ended = id, 0.0
    session.write("submitted", job=id, name=job.name, directory=job.directory)
    return id


def reserve_job(
    session: Session, name: str, directory: Path, *, run: str = "", reads: Sequence[str] = (), waits: bool = False
) -> JobEntry:
    """Enter the job into the ledger before it exists, so that two requests at once cannot share the last hours.

    `reads`: paths of its model. `waits`: for its round, in that directory; a second one of its name is refused.
    """
    policy = session.policy
    queue.note_ends(session)
    with ledger_locked(session.ledger) as (ledger, now):
        if waits and (other := ledger.waiting(name, now)) is not None:
            raise Refused(f"job {other.id} waits for a round already, and one a federation may")
        wanted, used = policy.nodes * policy.hours, ledger.node_hours(now)
        if used + wanted > policy.node_hours_per_day:
            raise Refused(
                f"the job may use {wanted:g} node-hours, {used:.2f} were used or reserved within 24 hours, and the "
                f"policy's node_hours_per_day is {policy.node_hours_per_day:g}"
            )
        job = JobEntry(
            id=f"{RESERVED}{now:.6f}",
            name=name,
            directory=str(directory),
            submitted=now,
            nodes=policy.nodes,
            hours=policy.hours,
            run=run,
            reads=list(reads),
            waited_in=str(directory) if waits else "",
        )
        ledger.jobs.append(job)
    return job


def leave_reason(session: Session, directory: Path, round: int, reason: str) -> None:
    """Leave `failure.json` where the update would be, and let it be read."""
    clear_update(directory)
    failure = report.Failure(
        facility=session.policy.facility, round=round, reason=f"refused by the facility's gate: {reason}"
    )
    with new_directory(directory / "update") as temporary:
        report.write(temporary, failure)
    with ledger_locked(session.ledger) as (ledger, now):
        ledger.jobs.append(JobEntry(id="", name="refused", directory=str(directory), submitted=now))


def render_script(session: Session, command_line: str, *, login: bool = False) -> str:
    """The site's template, filled, with a job's command in it; `login`: for this host itself."""
    policy, place = session.policy, session.home
    text, name = f"#!/bin/bash\n. '<home>/env.sh'\n{COMMAND}\n", "the template of this host"
    if policy.template and not login:
        path = find_template(policy.template, place)
        text, name = read_template(path), path.name
    home = policy.fill.get("home", str(place))
    fill = {} if login else {key: value for key, value in policy.fill.items() if key != "home"}
    filled = fill_template(text, fill=fill, environment=Environment(home=home), workdir=str(session.workdir), name=name)
    return script_of(filled, command_line)


def job_command(session: Session, approved: Approved, directory: Path) -> str:
    """One line of shell: every value in it is one quoted word, and none came from the request unchecked."""
    exports: dict[str, object] = {SIGNERS: session.policy.coordinators, AUDIT: session.log} | masking_exports(session)
    if session.policy.dataset_epsilon:
        exports |= {DATASET_LIMIT: session.policy.dataset_epsilon}
    words = ["python3", "-m", "facility.round", "--out", "update"]
    words += ["--model", str(approved.model), "--settings", str(approved.settings), "--dataset", str(approved.dataset)]
    words += ["--round", str(approved.round), "--module", approved.module]
    words += ["--approved", approved.model_sha256, approved.settings_sha256]
    if approved.roster is not None:
        words += ["--roster", str(approved.roster)]
    return shell_line(session, words, exports, directory)


def masking_exports(session: Session) -> dict[str, object]:
    """The policy's demands of secure aggregation, as the commands of `facility.masking` read them."""
    policy = session.policy
    signers = {PEER_SIGNERS: policy.peer_signers} if policy.peer_signers else {}
    return signers | ({MINIMUM_SUM: policy.minimum_sum} if policy.minimum_sum else {})


def shell_line(session: Session, words: Sequence[str], exports: Mapping[str, object], directory: Path) -> str:
    """One line of shell that runs a command in a directory, with variables set.

    The coordinator may write that directory. So no module is imported from it, and what libraries keep in HOME and
    TMPDIR and load again (compiled kernels, say) is where no request leads; nor do any lead to the notes by which the
    job's tasks meet, with the secret that admits a rank. Nor is a search path left that leads there.
    """
    own = scratch(session)
    all_exports = {"HOME": own, "TMPDIR": own, NOTES: own, "PYTHONSAFEPATH": 1, "PYTHONNOUSERSITE": 1} | dict(exports)
    if not session.policy.job_output:
        all_exports[report.JOB_OUTPUT] = 0
    set_up = " && ".join(f"export {name}={shlex.quote(str(value))}" for name, value in all_exports.items())
    place = shlex.quote(str(own))
    make = f"cd {shlex.quote(str(directory))} && mkdir -m 700 -p {place}"
    return f"{SHELL}; {make} && {set_up} && {shlex.join(words)} 2>&1"


def scratch(session: Session) -> Path:
    """A new directory of the gate's own for one job, which the job makes; removes those of jobs that are over."""
    place = session.state / SCRATCH
    place.mkdir(mode=0o700, exist_ok=True)
    oldest = time.time() - session.policy.hours * 3600 - SPARE_SECONDS
    for one in place.iterdir():
        if one.lstat().st_mtime < oldest:
            shutil.rmtree(one, ignore_errors=True)
    return place / secrets.token_hex(8)


def test_job(session: Session, request: Request) -> int:
    """Print whether the queue would take the site's template; returns the exit code. Submits nothing."""
    policy = session.policy
    if policy.scheduler == "ssh":
        print("no queue")
        return 0
    commands = queue.scheduler_commands(session)
    if not commands.dry:
        code, text = queue.run_program([commands.submit[0], "--version"])
        sys.stdout.write(text)
        return code
    text = render_script(session, "true")
    code, output = queue.run_program(queue.fill_words(commands.dry, queue.values_of(policy)), text=text)
    sys.stdout.write(output)
    return code
