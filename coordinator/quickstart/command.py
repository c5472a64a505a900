"""The command line of `crossfed quickstart`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.console import command_console
from facility.exchange.errors import CrossFedError, InputError
from facility.exchange.logs import configure_logging

if TYPE_CHECKING:
    from coordinator.quickstart.begin import Request
    from coordinator.quickstart.dialog import Dialog


def quickstart(
    folder: Annotated[Path, typer.Argument(help="Folder of the federation; it may exist.")],
    facility: Annotated[
        list[str] | None, typer.Option(help="NAME=[USER@]HOST[:PORT], or NAME=local. Repeat; without it, asked for.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH: text, or a prepared dataset, at that facility; the files stay there. Repeat."),
    ] = None,
    model: Annotated[str, typer.Option(help="Hub name, folder of a checkpoint, or demo for a small new one.")] = "",
    name: Annotated[str, typer.Option(help="Name of the federation.")] = "federation",
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="Private ssh key, or NAME=PATH for one facility; default ssh-agent and ~/.ssh/config. Repeat."
        ),
    ] = None,
    known_hosts: Annotated[str, typer.Option(help="File of host keys; default ~/.ssh/known_hosts.")] = "",
    rounds: Annotated[int, typer.Option(help="Rounds.", min=1)] = 5,
    steps: Annotated[int, typer.Option(help="Optimizer steps of one facility in a round.", min=1)] = 100,
    batch_sequences: Annotated[int, typer.Option(help="Blocks of one step; lowered for small datasets.", min=1)] = 64,
    block_tokens: Annotated[
        int, typer.Option(help="Tokens of a block; 0: the model's limit, at most 1024.", min=0)
    ] = 0,
    prepare: Annotated[str, typer.Option(help="Further arguments of facility.prepare, as one word.")] = "",
    answer: Annotated[
        list[str] | None, typer.Option(help="QUESTION=VALUE, such as bologna.partition=boost_usr_prod. Repeat.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: take every proposal.")] = False,
    set_up: Annotated[bool, typer.Option(help="Set the facilities up and prepare their data.")] = True,
) -> None:
    """From logins to a checked federation: ask each site what it has, write federation.yml, set up, prepare, check.

    The same command goes on where it stopped.
    """
    from coordinator.preflight.check import check_for_run, show_rows
    from coordinator.quickstart.begin import Request
    from coordinator.quickstart.describe import RoundTraining
    from coordinator.quickstart.dialog import Dialog

    configure_logging(default="info")
    request = Request(
        folder=folder,
        name=name,
        facilities=pairs("--facility", facility or []),
        model=model,
        data=pairs("--data", data or []),
        keys=pairs("--key", [word if "=" in word else f"={word}" for word in key or []], least=0),
        known_hosts=known_hosts,
        plan=RoundTraining(rounds=rounds, steps=steps, batch_sequences=batch_sequences),
        block_tokens=block_tokens,
        prepare=_words(prepare),
        set_up=set_up,
    )
    file = _begin(request, Dialog(given=pairs("--answer", answer or []), yes=yes))
    code = show_rows(check_for_run(file, link=False), as_json=False, console=command_console(160))
    further = f"next: cd {shlex.quote(str(folder))} && crossfed run"
    print(further if code == 0 else "fix what fails, then run the same command again")
    raise typer.Exit(code)


def _begin(request: Request, dialog: Dialog) -> Path:
    """federation.yml of the folder; where there is none after an error, what a person typed is printed first."""
    from coordinator.quickstart.begin import begin, federation_file

    try:
        return begin(request, dialog)
    except (CrossFedError, KeyboardInterrupt):
        if dialog.typed and not federation_file(request.folder).exists():
            print(f"to keep your answers, add them to the command, corrected: {dialog.again()}", file=sys.stderr)
        raise


def _words(prepare: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(prepare))
    except ValueError as error:
        raise InputError(f"--prepare is {prepare!r}, expected arguments as in a shell: {error}") from None


def pairs(option: str, words: Sequence[str], *, least: int = 1) -> dict[str, str]:
    """Options of the form NAME=VALUE. Raises `InputError` for a word without `=`, or a name given twice.

    `least`: letters of a name.
    """
    result: dict[str, str] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or len(name) < least or not value:
            raise InputError(f"{option} {word!r}: expected NAME=VALUE")
        if name in result:
            raise InputError(f"{option} names {name!r} twice; give it once")
        result[name] = value
    return result
