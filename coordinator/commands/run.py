"""Commands that check, render and run a federation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from coordinator.commands.app import RUN, FacilityArgument, FederationOption, app
from coordinator.console import command_console, reported_meanwhile
from facility.exchange.errors import InputError
from facility.exchange.exit_codes import ExitCode
from facility.exchange.text import number_of


@app.command(rich_help_panel=RUN)
def check(
    federation: FederationOption,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    link: Annotated[bool, typer.Option(help="Measure each link by sending 16 MB.")] = True,
    submit: Annotated[
        bool, typer.Option("--submit", help="Where a scheduler has no dry run, submit a job of one second.")
    ] = False,
) -> None:
    """Check what can be known before a job is submitted; each failing row comes with a fix. Exit 1 if one fails."""
    from coordinator.preflight.check import check_for_run, show_rows

    rows = check_for_run(federation, link=link, submit=submit)
    raise typer.Exit(show_rows(rows, as_json=as_json, console=command_console(160)))


@app.command(rich_help_panel=RUN)
def run(
    federation: FederationOption,
    quiet: Annotated[bool, typer.Option("--quiet", help="No live display; events as plain lines.")] = False,
    log: Annotated[Path | None, typer.Option(help="StreamFlow's whole log; default <workdir>/streamflow.log.")] = None,
    despite_check: Annotated[
        bool, typer.Option("--despite-check", help="Run even when a check here, or the last `crossfed check`, fails.")
    ] = False,
    accept: Annotated[
        bool, typer.Option("--accept", help="Go on though federation.yml has changed in what affects results.")
    ] = False,
) -> None:
    """Run preflight checks, render, call `streamflow run`, show rounds and steps; rerun to resume after any stop."""
    from coordinator.config.federation import read_federation
    from coordinator.config.local_paths import check_paths
    from coordinator.engine.run import run_federation
    from coordinator.preflight.coordinator import failing_here
    from coordinator.preflight.last_check import still_failing

    if not despite_check:
        described = read_federation(federation)
        check_paths(described)
        with reported_meanwhile(lambda: "StreamFlow, the model, disks and rendered files are being checked"):
            failing = failing_here(described)
        if failing:
            problems = "; ".join(f"{row.check}: {row.found} ({row.fix})" for row in failing)
            raise InputError(f"{problems}. Correct this, or run with --despite-check")
        if problems := still_failing(described, federation):
            raise InputError(f"{problems}. Correct this and check again, or run with --despite-check")

    raise typer.Exit(run_federation(federation, live=not quiet and sys.stdout.isatty(), log=log, accepted=accept))


@app.command(rich_help_panel=RUN)
def render(
    federation: FederationOption,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if a rendered file is stale.")] = False,
    paths: Annotated[bool, typer.Option(help="Refuse when the model or a local dataset is not there yet.")] = True,
) -> None:
    """Render federation.yml: streamflow.yml, settings.yml, coordinator.json, facilities/*.json and cwl/round.cwl.

    The CWL is beside `workflow/`, elsewhere beside federation.yml.
    """
    from coordinator.config.federation import read_federation
    from coordinator.config.local_paths import check_paths
    from coordinator.engine.render import stale_files
    from coordinator.engine.run import render_alone

    if check and not paths:
        raise InputError("--no-paths has no effect with --check, which looks at no path: leave it out")
    described = read_federation(federation)
    if described.deprecated:
        print(f"deprecated: {described.deprecated}")
    if check:
        differing = stale_files(described)
        for name in differing:
            print(f"stale: {name}")
        raise typer.Exit(ExitCode.FOUND if differing else ExitCode.OK)
    if paths:
        check_paths(described)
    changed = render_alone(described)
    removed = sum(not path.exists() for path in changed)
    gone = f", {removed} removed" if removed else ""
    print(f"{number_of(len(changed) - removed, 'file')} written{gone}" if changed else "everything is up to date")
    for path in changed:
        print(f"  {path}" + ("" if path.exists() else " (removed: its facility is not in federation.yml)"))


@app.command(rich_help_panel=RUN)
def login(
    facility: FacilityArgument,
    federation: FederationOption,
) -> None:
    """Renew a facility's login by its `renew:` command, if any, and test it; a run that waits for it then continues."""
    from coordinator.config.federation import read_federation
    from coordinator.login import log_in

    row = log_in(read_federation(federation), facility)
    print(f"{facility}: {row.found}" + (f"\n-> {row.fix}" if row.fix else ""))
    raise typer.Exit(ExitCode.OK if row.verdict == "ok" else ExitCode.FOUND)


@app.command(rich_help_panel=RUN)
def rewind(
    federation: FederationOption,
    to: Annotated[int, typer.Option("--to", help="Round that is to come next, from 0.")],
) -> None:
    """Go back to a round: it and later ones are set aside in the archive; `crossfed run` goes on from there."""
    from coordinator.archive.rewind import STATELESS, lacks_state
    from coordinator.archive.rewind import rewind as go_back
    from coordinator.archive.rounds import Archive
    from coordinator.config.federation import read_federation
    from coordinator.engine.one_run import only_one

    described = read_federation(federation)
    with only_one(described):
        archive = Archive(described.archive_path)
        aside = go_back(archive, to)
    print(f"round {to} comes next; what was made from it on is in {aside}")
    if lacks_state(archive, to):
        print(
            "the archive keeps the float32 master and the server optimizer's state of the newest round alone: "
            f"round {to} begins {STATELESS}"
        )
