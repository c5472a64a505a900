"""The application that every command belongs to, the panels of its help, and the options of all commands."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from coordinator.config.locate import find_federation
from facility import __version__
from facility.exchange.command_line import refuse_empty
from facility.exchange.errors import CrossFedError, InputError
from facility.exchange.logs import LEVELS, VARIABLE, configure_logging
from facility.exchange.logs import log_level as effective_level

PANELS = SET_UP, RUN, WATCH, PLAN, REHEARSE = "Set up", "Run", "Watch", "Plan", "Rehearse"
"""Panels of `crossfed --help`, in its order."""


class Interrupted(BaseException):
    """Ctrl-C, under a name that typer leaves alone: of `KeyboardInterrupt` it makes an exit code without a word."""


class Commands(TyperGroup):
    """All commands."""

    def make_context(self, info_name: Any, args: list[str], *arguments: Any, **further: Any) -> Any:
        refuse_empty(args)
        try:
            return super().make_context(info_name, args, *arguments, **further)
        except KeyboardInterrupt:
            raise Interrupted from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None


app = typer.Typer(
    cls=Commands,
    name="crossfed",
    help="Cross-facility federated learning of foundation models, run as a CWL workflow.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
COMPLETING = "_CROSSFED_COMPLETE"
"""Set by a shell that completes a line of `crossfed`."""


def _federation() -> Path:
    """The federation of this folder; a shell that completes a line gets no error where there is none."""
    try:
        return find_federation()
    except InputError:
        if COMPLETING not in os.environ:
            raise
        return Path("federation.yml")


FederationOption = Annotated[
    Path,
    typer.Option(
        "--federation",
        "-f",
        default_factory=_federation,
        show_default="./federation.yml, else ./workflow/federation.yml",
        help="The file that describes the federation.",
    ),
]


def facilities_for_completion(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of facilities that begin like this, for the shell; none where no federation can be read."""
    from coordinator.config.federation import read_federation

    try:
        names = read_federation(ctx.params.get("federation") or _federation()).names
    except CrossFedError:
        return []
    return [name for name in names if name.startswith(incomplete)]


FacilityArgument = Annotated[
    str, typer.Argument(help="A facility of the federation.", autocompletion=facilities_for_completion)
]


def given_options(context: typer.Context) -> set[str]:
    """Names of the parameters that the command line gives."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Short for --log-level info.")] = False,
    log_level: Annotated[
        str,
        typer.Option(
            help=f"Least severe log message to print: {', '.join(LEVELS)}.",
            show_default=f"${VARIABLE}, else warning; info in jobs and steps",
        ),
    ] = "",
) -> None:
    if log_level and log_level not in LEVELS:
        raise InputError(f"--log-level is {log_level!r}, expected one of {', '.join(LEVELS)}")
    configure_logging(log_level or ("info" if verbose else None))
    logging.getLogger("streamflow").addFilter(_of_the_engine)


def _of_the_engine(record: logging.LogRecord) -> bool:
    """Hide the warnings of connectors that a command uses itself, unless more is asked for: what fails for good is in
    its answer, by the facility's name. The engine of a run is another process, with a log of its own."""
    return record.levelno >= logging.ERROR or effective_level() in ("debug", "info")
