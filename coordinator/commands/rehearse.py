"""Commands that rehearse on this machine: the demo, a trainer's conformance run and the testbed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from coordinator.commands.app import REHEARSE, app


@app.command(rich_help_panel=REHEARSE)
def demo(
    out: Annotated[Path, typer.Option(help="Folder to make the demo in.")] = Path("crossfed-demo"),
    quiet: Annotated[bool, typer.Option("--quiet", help="No live display; events as plain lines.")] = False,
) -> None:
    """Make and run a small federation of two facilities on this machine: five rounds, a minute or two, no download."""
    from coordinator.demo import make_federation
    from coordinator.engine.run import run_federation

    raise typer.Exit(run_federation(make_federation(out), live=not quiet and sys.stdout.isatty()))


@app.command(
    rich_help_panel=REHEARSE,
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def conformance(context: typer.Context) -> None:
    """Try a trainer of your own (MODULE) on a pico model: does it keep the contract of facility.train?"""
    from coordinator.conformance import check_conformance

    raise typer.Exit(check_conformance(context.args))


@app.command(
    rich_help_panel=REHEARSE,
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def testbed(context: typer.Context) -> None:
    """Rehearse on two real facilities on this machine (root): up, run, status, stop, start, shape, down."""
    from coordinator.testbed.__main__ import main as rehearse

    raise typer.Exit(rehearse(context.args))
