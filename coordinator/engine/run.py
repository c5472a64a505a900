"""`crossfed run`: render, check, `streamflow run`, and show what happens; the same command resumes after any stop."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape

from coordinator.archive.audit import NAME as AUDIT_LOG
from coordinator.archive.audit import VARIABLE as LOG
from coordinator.archive.journal import Journal
from coordinator.archive.narrow import print_rounds
from coordinator.archive.remarks import summary_remarks
from coordinator.archive.rewind import finish_rewind
from coordinator.archive.rounds import Archive
from coordinator.archive.summary import shown_perplexity, summary
from coordinator.certificates import certificates_watched
from coordinator.config.deployments import job_template
from coordinator.config.described import describe_federation
from coordinator.config.federation import Federation, read_federation
from coordinator.config.local_paths import check_paths
from coordinator.engine.console_log import ConsoleHandler, lasting_console, shown_on
from coordinator.engine.history import History
from coordinator.engine.how_to_load import how_to_load
from coordinator.engine.left_jobs import cancel_left, cancel_set_aside, remember_queues
from coordinator.engine.live import Snapshot, live_table, waiting_sentence
from coordinator.engine.notify import Notifier
from coordinator.engine.one_run import only_renderer_where_runs_are, only_run
from coordinator.engine.open_files import allow_open_files
from coordinator.engine.place import RunPlace, login_place, run_place
from coordinator.engine.progress import Progress
from coordinator.engine.queues import read_queues
from coordinator.engine.recorder import Recorder
from coordinator.engine.render import write_rendered
from coordinator.engine.supervise import Supervisor
from coordinator.events.event import Event
from coordinator.rounds.acceptance import accept, changes_since, is_accepted, refusal
from coordinator.schedulers.directives import hours_asked
from coordinator.shown_text import safe_line
from coordinator.streamflow_plugin.names import LOGINS, PROGRESS_SECONDS
from facility.exchange.errors import InputError
from facility.exchange.exit_codes import ExitCode
from facility.exchange.files.durable import make_parents
from facility.exchange.files.storage import why_unwritable
from facility.exchange.logs import escape_controls
from facility.exchange.text import number_of

log = logging.getLogger("coordinator.engine")

AS_PROGRAM = "import sys; from streamflow.main import run; sys.exit(run())"
"""What StreamFlow's program does. `python -m streamflow` ends with 0 whatever happened."""


def run_federation(file: Path, *, live: bool, log: Path | None = None, accepted: bool = False) -> int:
    """Run or resume the federation; returns the exit code for the shell. Raises `InputError`, `TransientError`.

    `accepted`: go on though federation.yml has changed in what affects results.
    """
    federation = read_federation(file)
    check_paths(federation)
    archive = Archive(federation.archive_path)
    places = [archive.path if archive.path.exists() else archive.path.parent, federation.workdir_path]
    if reason := why_unwritable(places):
        raise InputError(reason)
    console = lasting_console()
    log = log or federation.workdir_path / "streamflow.log"
    make_parents(log)
    with only_run(federation) as locks:
        if said := finish_rewind(archive):
            console.print(said, markup=False, highlight=False)
        # Not before: a run that is under way reads the rendered files in every round.
        _show_changes(federation, archive, console, accepted=accepted)
        cancel_left(federation, console)
        cancel_set_aside(federation, archive, console)
        write_rendered(federation)
        remember_queues(federation)
        done = len(archive.rounds())
        facilities = number_of(len(federation.facilities), "facility", "facilities")
        console.print(
            f"federation [bold]{federation.name}[/bold]: {facilities}, {number_of(federation.rounds, 'round')}"
            f"{going_on(federation.rounds, done)}; StreamFlow's log is {escape(str(log))}"
        )
        names = federation.names
        history = History(archive)
        progress = Progress(names, federation.rounds, done=done, unit=lambda: history.words().live_unit)
        with run_place(federation.workdir_path) as place, log_file(log) as sink:
            run = Run(
                federation=federation,
                progress=progress,
                archive=archive,
                history=history,
                place=place,
                locks=locks,
                sink=sink,
                console=console,
                done=done,
            )
            code, ended = _follow(run, live)
    return _show_end(federation, archive, console, code, ended)


def _show_end(federation: Federation, archive: Archive, console: Console, code: int, ended: str) -> int:
    """The summary of the archive, and what follows from the run's exit code, which is returned."""
    data = summary(archive)
    print_rounds(console, data)
    for line in summary_remarks(data | {"aggregation": federation.chosen}):
        console.print(line, markup=False, highlight=False)
    if code == 0:
        call = how_to_load(Path(data["model"]), base=str(archive.model_for(0)))
        console.print(f"the model is [bold]{escape(data['model'])}[/bold] ({escape(call)})")
        console.print(f"the report is {escape(str(archive.path / 'report.html'))}")
        return 0
    reason = data["stopped"] or ended
    console.print(f"the run ended with code {code}: {safe_line(reason)}", style="red", markup=False, highlight=False)
    first = "; once that is fixed," if code == ExitCode.INPUT else ";"
    console.print(f"Complete rounds in the archive: {len(data['rounds'])}{first} the same command goes on from there.")
    return code


def _show_changes(federation: Federation, archive: Archive, console: Console, *, accepted: bool) -> None:
    """What has changed in federation.yml since the latest round. Raises `InputError` where it must be accepted.

    The error names the changes that must be, the first step of a run that goes on names them all: each is said once.
    """
    if federation.deprecated:
        console.print(f"deprecated: {safe_line(federation.deprecated)}", markup=False, highlight=False)
    now = describe_federation(federation)
    changes = changes_since(archive, now)
    if accepted and changes:
        accept(archive, now)
    elif not is_accepted(archive, now, changes):
        for change in changes:
            if not change.affects:
                console.print(f"changed: {safe_line(change)}", markup=False, highlight=False)
        raise refusal([change for change in changes if change.affects])


def going_on(rounds: int, done: int) -> str:
    """What the archive already holds, as the first line says it; `done` may be more than `rounds`, lowered since."""
    if not done:
        return ""
    if done < rounds:
        return f", going on after round {done - 1}"
    if done > rounds:
        return f", all are done: {done} in all"
    return f", all {done} are done" if done > 1 else ", which is done"


def render_alone(federation: Federation) -> list[Path]:
    """Render; returns the files that changed. Raises `TransientError` while a run, which reads them, is alive."""
    with only_renderer_where_runs_are(federation):
        return write_rendered(federation)


@contextmanager
def log_file(path: Path) -> Iterator[TextIO]:
    """A log to append to. What a full disk keeps from being written is lost, and stops nothing."""
    sink = open(path, "a", encoding="utf-8")
    try:
        yield sink
    finally:
        with suppress(OSError):
            sink.close()


def engine_command(federation: Federation) -> list[str]:
    """`streamflow run` by this Python. Raises `InputError` where it has no StreamFlow.

    The program beside Python where there is one, else what it does: what `pip install --user` or `--target` installed
    has no program there.
    """
    program = Path(sys.executable).parent / "streamflow"
    if not program.exists() and find_spec("streamflow") is None:
        raise InputError(
            f"{program} does not exist, and {sys.executable} has no module streamflow: install the coordinator's part "
            "(`pip install 'crossfed[coordinator]'`; in a checkout, `bash coordinator/setup.sh` or `make demo`)"
        )
    stamp = time.strftime("%Y%m%d-%H%M%S")
    outputs = federation.workdir_path / "outputs"
    return [
        *([str(program)] if program.exists() else [sys.executable, "-c", AS_PROGRAM]),
        "run",
        "--name",
        f"{federation.name}-{stamp}-{os.getpid()}",
        "--outdir",
        str(outputs),
        "streamflow.yml",
    ]


def engine_environment() -> dict[str, str]:
    """Environment in which jobs of local steps find this Python first."""
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONUNBUFFERED": "1",
    }


def job_limits(federation: Federation) -> dict[str, float]:
    """Seconds that a job may take, by facility whose template or `options:` say; behind a gate the site's own does."""
    folder = federation.file.parent
    asked = {
        one.name: hours_asked(one.deployment.options, job_template(one.deployment, folder) or "")
        for one in federation.facilities
        if not one.deployment.gate
    }
    return {name: round(3600 * hours, 3) for name, hours in asked.items() if hours}


def give_up_seconds(federation: Federation) -> dict[str, float]:
    """Seconds after which a stuck job is given up, by facility."""
    return {one.name: one.deployment.give_up_minutes * 60.0 for one in federation.facilities}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that holds its locks."""

    federation: Federation
    progress: Progress
    archive: Archive
    history: History
    place: RunPlace
    locks: tuple[int, ...]
    """File descriptors of the locks, which StreamFlow inherits."""
    sink: TextIO
    """StreamFlow's log: every line goes there."""
    console: Console
    """What an operator should see goes there."""
    done: int
    """Rounds in the archive at the start."""

    def stopped(self) -> str:
        """Why the run ended, by the archive or the state of its disks; empty: unknown."""
        return str(self.archive.read_note("stopped").get("reason", "")) or self.unwritable()

    def unwritable(self) -> str:
        """A sentence on the archive or the work directory where it takes no file, or ''."""
        folders = [self.archive.path, self.federation.workdir_path]
        return why_unwritable([folder for folder in folders if folder.exists()])

    def write_line(self, line: str) -> None:
        """Append a line to StreamFlow's log, in which facilities' jobs are quoted, as text for whoever looks at it."""
        with suppress(OSError):  # a log that cannot be written stops no federation
            self.sink.write(escape_controls(line) + "\n")
            self.sink.flush()


def _follow(run: Run, live: bool) -> tuple[int, str]:
    """Exit code and reason of the supervised run."""
    federation, archive = run.federation, run.archive
    allow_open_files()
    notifier = Notifier(federation.name, federation.notify, federation.file.parent)
    recorder = _recorder(federation, run.progress, archive, notifier)
    console = ConsoleHandler(run.console)

    def on_tick() -> None:
        recorder.tick()
        if not live:
            console.say_if_quiet(lambda: waiting_sentence(recorder.snapshot(), time.time()))

    supervisor = _supervisor(run, recorder, on_tick)
    with shown_on(console), _stopped_by_signals(supervisor):
        recorder.begin(run.done, job_limits(federation))
        code, reason = 1, "the supervisor itself failed"
        try:
            with (
                certificates_watched(federation.facilities, expiring=recorder.expiring),
                _display(run.progress, run.history, run.console) if live else nullcontext(),
            ):
                code, reason = supervisor.run()
                return code, reason
        finally:
            done = code == 0 and run.done < len(archive.rounds())
            recorder.end(code, run.stopped() or reason, done=done)
            notifier.close()


def _supervisor(run: Run, recorder: Recorder, on_tick: Callable[[], object]) -> Supervisor:
    """Runs the engine; what it reports goes to the run's progress, its console and the recorder."""
    federation, archive = run.federation, run.archive

    def tell(sentence: str | None) -> None:
        if sentence is not None:
            log.info(sentence)

    def on_event(event: Event) -> None:
        tell(run.progress.feed(event))
        recorder.hear(event)

    return Supervisor(
        command=lambda: engine_command(federation),
        directory=federation.file.parent,
        environment=engine_environment()
        | run.place.environment()
        | {PROGRESS_SECONDS: str(federation.progress_seconds), LOG: str(archive.path / AUDIT_LOG)}
        | {LOGINS: str(login_place(federation.workdir_path))},
        queues=read_queues(federation.file.parent / "streamflow.yml", give_up_seconds(federation)),
        on_line=run.write_line,
        events=run.place.events,
        on_event=on_event,
        on_tick=on_tick,
        on_again=run.progress.start_again,
        on_stuck=recorder.stuck,
        on_away=lambda name, sentence: tell(run.progress.find_away(name, sentence)),
        on_back=lambda name: tell(run.progress.find_back(name)),
        rounds_done=lambda: len(archive.rounds()),
        unwritable=run.unwritable,
        stopped=run.stopped,
        pass_fds=run.locks,
    )


def _recorder(federation: Federation, progress: Progress, archive: Archive, notifier: Notifier) -> Recorder:
    return Recorder(
        federation=federation.name,
        progress=progress,
        journal=Journal(archive.path),
        notifier=notifier,
        workdir=federation.workdir_path,
    )


@contextmanager
def _stopped_by_signals(supervisor: Supervisor) -> Iterator[None]:
    """SIGINT and SIGTERM end the supervised run, which then ends by itself and cancels its jobs.

    A terminal that is closed (SIGHUP) ends this command as SIGKILL does: connections to login nodes break, and the jobs
    of an evening should not be lost with them. The next start waits for those that run.
    """
    handlers = {
        number: signal.signal(number, lambda number, _: supervisor.stop(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _display(progress: Progress, history: History, console: Console) -> Live:
    return Live(
        get_renderable=lambda: _picture(progress, history), console=console, refresh_per_second=2, transient=True
    )


def _picture(progress: Progress, history: History) -> Group:
    now = time.time()
    rounds, words = history.rounds(), history.words()
    below = ""
    if rounds:
        known = [value for entry in rounds if (value := shown_perplexity(entry.global_loss)) is not None]
        values = ", ".join(map(words.text, known))
        below = f"global {words.metric} as received, round by round: {values}"
    return live_table(
        Snapshot(
            federation="",
            heading=progress.heading,
            coordinator=progress.step,
            time=now,
            unit=words.live_unit,
            facilities=progress.live,
        ),
        below=below,
    )
