"""`crossfed`: the commands a person types. They are in `coordinator/commands/`."""

from __future__ import annotations

import sys
from typing import Any

import typer

from coordinator.commands import plan, rehearse, run, set_up, watch  # noqa: F401 (each adds its commands)
from coordinator.commands.app import PANELS, Interrupted, app
from facility.exchange.errors import InputError, exit_on_error, for_terminal
from facility.exchange.exit_codes import ExitCode
from facility.exchange.interrupts import WORD

app.registered_commands.sort(key=lambda command: PANELS.index(str(command.rich_help_panel)))


ClickException: Any = typer.BadParameter.__mro__[2]
"""What typer raises for words that it cannot take: click's class, or that of the copy of click in newer versions."""


def main() -> None:
    try:
        sys.exit(exit_on_error(called))
    except ClickException as error:
        error.message = for_terminal(error.message)
        error.show()
        sys.exit(error.exit_code)


def called() -> int:
    """Call the command that was typed; returns its exit code."""
    try:
        result = app(standalone_mode=False)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.Abort:  # before a command began, or at a question
        print(WORD, file=sys.stderr)
        return ExitCode.INTERRUPTED
    except Interrupted:
        raise KeyboardInterrupt from None
    except ModuleNotFoundError as error:  # a facility's environment has the command, and not the coordinator's packages
        missing = str(error.name).partition(".")[0]
        if missing in ("coordinator", "facility"):
            raise
        raise InputError(
            f"the environment {sys.prefix} has no package {missing!r}, expected those of the coordinator: install them "
            "by `pip install 'crossfed[coordinator]'` there, or by coordinator/setup.sh of a checkout"
        ) from None
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    main()
