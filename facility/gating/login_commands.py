"""The two commands of secure aggregation that need no queue, run on this host: `keys` and `unmask`.

Keys say nothing of the data, so settings that no order has named yet are held against the policy alone. An answer needs
settings that a signed order named. Both are given copies of the settings, and of the request to unmask, that the
coordinator cannot alter.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from facility.exchange.errors import InputError
from facility.exchange.messages.settings import FacilitySettings
from facility.gating import queue
from facility.gating.approval import check_dataset, check_files, check_masking
from facility.gating.grammar import Request
from facility.gating.held import check_sent, confined_source, paths_alone, places_of
from facility.gating.jobs import job_directory, leave_reason, masking_exports, render_script, shell_line
from facility.gating.ledger import JobEntry, ledger_locked
from facility.gating.refusal import Refused
from facility.gating.session import Session
from facility.gating.settings_copy import SettingsCopy, settings_copy
from facility.masking.request_copy import private_copy

SECONDS = 600.0
"""Time limit."""


def keys(session: Session, request: Request) -> int:
    """Draw this facility's keys for a round (`facility.keys`)."""
    return _run(session, request, ["facility.keys"], ordered=False)


def unmask(session: Session, request: Request) -> int:
    """Answer a request to unmask a round's sum (`facility.unmask`)."""
    return _run(session, request, ["facility.unmask"], ordered=True)


def _run(session: Session, request: Request, command: Sequence[str], *, ordered: bool) -> int:
    directory = job_directory(session, request)
    update = directory / "update"
    if update.exists() or update.is_symlink():
        raise Refused(f"{directory} is not a new directory for {request.verb}")
    with settings_copy(session) as copy, ExitStack() as stack:
        try:
            with paths_alone(session):
                copy.take(confined_source(request["settings"], session))
            settings = _checked(session, copy, ordered=ordered)
            dataset = check_dataset(session, request["dataset"])
            options = _asked(session, request, stack)
            _count(session)
        except Refused as error:
            leave_reason(session, directory, int(request["round"]), str(error))
            raise
        name = session.job_name(settings.federation)
        with ledger_locked(session.ledger) as (ledger, now):  # what it leaves may be read; it costs no node-hours
            ledger.jobs.append(JobEntry(id="", name=request.verb, directory=str(directory), submitted=now))
        session.write("login command", command=request.verb, round=int(request["round"]), settings=copy.digest)
        words = [
            "python3",
            "-m",
            *command,
            *options,
            "--out",
            "update",
            "--settings",
            str(copy.path),
            "--dataset",
            str(dataset),
        ]
        text = shell_line(session, [*words, "--round", request["round"]], masking_exports(session), directory)
        return queue.on_this_host(session, render_script(session, text, login=True), name, directory, seconds=SECONDS)


def _asked(session: Session, request: Request, stack: ExitStack) -> list[str]:
    """The option that names the request to unmask, if any: a copy that lasts as long as the stack. Raises `Refused`."""
    if "request" not in request.given:
        return []
    with paths_alone(session):
        asked = confined_source(request["request"], session)
        check_sent(places_of(asked), session)
        try:
            return ["--request", str(stack.enter_context(private_copy(asked)))]
        except (InputError, OSError) as error:
            raise Refused(str(error)) from None


def _checked(session: Session, copy: SettingsCopy, *, ordered: bool) -> FacilitySettings:
    """The settings, once they are found to be within the policy. Raises `Refused`."""
    settings = copy.read(session)
    if settings.masking is None:
        raise Refused("the settings ask for no secure aggregation")
    check_masking(session, settings.masking)
    check_files(session, settings)
    if ordered:
        copy.check_ordered(session)
    return settings


def _count(session: Session) -> None:
    most = session.policy.login_commands_per_day
    with ledger_locked(session.ledger) as (ledger, now):
        if (count := ledger.count_command(now)) > most:
            raise Refused(f"{count} commands within 24 hours, the policy's login_commands_per_day is {most}")
