"""Commands that show how a federation goes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.commands.app import WATCH, FederationOption, app, facilities_for_completion
from coordinator.console import command_console
from facility.exchange.errors import InputError
from facility.exchange.files.bounded import real_path
from facility.exchange.text import number_of

if TYPE_CHECKING:
    from coordinator.config.federation import Federation


@app.command(rich_help_panel=WATCH)
def status(
    federation: FederationOption,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    queues: Annotated[
        bool, typer.Option("--queues", help="Also ask the facilities for our jobs: a login each.")
    ] = False,
    following: Annotated[
        bool, typer.Option("--follow", help="Show each facility's job until the run ends; no login, no question.")
    ] = False,
) -> None:
    """Print rounds, facilities and losses from the archive; with --queues also why jobs wait and what to do."""
    from coordinator.config.federation import read_federation

    if following and queues:
        raise InputError("--queues has no effect with --follow, which asks no facility: leave one of them out")
    described = read_federation(federation)
    if following:
        from coordinator.engine.follow_run import follow_run

        raise typer.Exit(follow_run(described.workdir_path, as_json=as_json))
    data = _progress(described, queues=queues)
    if as_json:
        print(json.dumps(data, indent=2, ensure_ascii=False))
    else:
        _print_progress(described, data)


def _progress(described: Federation, *, queues: bool) -> dict[str, Any]:
    """What the archive says of the federation, with our jobs in the facilities' `queues` on request."""
    from coordinator.archive.rounds import Archive
    from coordinator.archive.summary import summary

    found = summary(Archive(described.archive_path))
    data = found | {"federation": described.name, "rounds_wanted": described.rounds}
    if queues:
        from coordinator.engine.queues import read_queues
        from coordinator.engine.stuck_jobs import current_jobs

        data["jobs"] = current_jobs(read_queues(described.file.parent / "streamflow.yml"))
    return data


def _complete(done: int, wanted: int) -> str:
    """How many rounds are complete; there may be more than are wanted, lowered since."""
    if done > wanted:
        return f"{number_of(done, 'round')} are complete, {wanted:,} {'was' if wanted == 1 else 'were'} asked for,"
    return f"{done:,} of {number_of(wanted, 'round')} {'is' if 1 in (done, wanted) else 'are'} complete"


def _print_progress(described: Federation, data: dict[str, Any]) -> None:
    from rich.markup import escape

    from coordinator.archive.narrow import print_rounds
    from coordinator.archive.remarks import summary_remarks
    from coordinator.engine.stuck_jobs import lines_of
    from coordinator.shown_text import safe_line

    console = command_console(140)
    console.print(
        f"federation {described.name}: {_complete(len(data['rounds']), described.rounds)} in {escape(data['archive'])}"
    )
    print_rounds(console, data)
    for line in summary_remarks(data):
        console.print(line, markup=False, highlight=False)
    if data["stopped"]:
        console.print(f"stopped: {safe_line(data['stopped'])}", style="red", markup=False, highlight=False)
    for line in lines_of(data.get("jobs", [])):
        console.print(safe_line(line), markup=False, highlight=False)


@app.command(rich_help_panel=WATCH)
def explain(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="A facility, `round N`, or a key of federation.yml such as training.sync.policy.",
            autocompletion=facilities_for_completion,
        ),
    ] = None,
    federation: Annotated[
        Path | None, typer.Option("--federation", "-f", help="The federation, for a facility or a round.")
    ] = None,
) -> None:
    """Say why a facility is absent, waiting or refused, or what became of a round; or what a settings key means.

    Without a word: the tree of all keys. `facility NAME` for a facility that is named like a key.
    """
    from coordinator.explain import explain_words

    print(explain_words(words or [], federation))


@app.command(rich_help_panel=WATCH)
def report(
    federation: FederationOption,
    out: Annotated[
        Path | None, typer.Option(help="File to write; default report.html, .md or .json in the archive.")
    ] = None,
    format: Annotated[
        str,
        typer.Option(help="html, md or json; default what the name of --out ends in, else html.", show_default=False),
    ] = "",
) -> None:
    """Write the report of the federation so far: curves, timeline, traffic, cost, updates, failures, digests.

    HTML is one self-contained file that needs no network.
    """
    from coordinator.report.make import make_report

    print(make_report(federation, out, format))


@app.command(rich_help_panel=WATCH)
def publish(
    federation: FederationOption,
    out: Annotated[Path, typer.Option(help="Folder to make, with model/ and crate/.")] = Path("publication"),
) -> None:
    """Make the final model with its card, and a Workflow Run RO-Crate of how it came about and is made again."""
    if find_spec("rocrate") is None:
        raise InputError("publish needs the package rocrate, which is not installed here: pip install 'rocrate>=0.15'")
    from coordinator.publishing.publish import publish as make

    print(f"{make(federation, real_path(out.parent) / out.name)}: model/ with its card, crate/ with reproduce.md")


@app.command(rich_help_panel=WATCH)
def audit(
    action: Annotated[str, typer.Argument(help="verify, head or compare")],
    file: Annotated[Path, typer.Argument(help="An audit log: audit.jsonl of an archive or of a facility's gate.")],
    head: Annotated[list[str] | None, typer.Option(help="Digest of a line that was seen before (repeat).")] = None,
    archive: Annotated[
        Path | None, typer.Option(help="Archive whose log recorded heads of this facility's log, with --facility.")
    ] = None,
    facility: Annotated[str, typer.Option(help="Facility whose log FILE is.")] = "",
    others: Annotated[
        list[str] | None, typer.Argument(help="compare: heads, copies of the log, or the log of a facility's gate.")
    ] = None,
) -> None:
    """Follow an audit log's chain of digests; report the first broken line by number, and lines that were cut off.

    `head` prints LINES:SHA256, which binds all lines so far; `compare` says whether heads and copies that others were
    shown are of the same log, with the first line that differs. Exit 1 where they are not shown to be.
    """
    from coordinator.archive.audit import heads_of
    from facility.exchange.messages.audit_compare import compare_logs, head_of, verify_heads

    if action not in ("verify", "head", "compare"):
        raise InputError(f"audit knows verify, head and compare, not {action!r}: give `crossfed audit verify FILE`")
    if others and action != "compare":
        raise InputError(f"audit {action} takes one log, but {others[0]!r} was given as well")
    if (archive is None) != (not facility):
        raise InputError("--archive and --facility go together: whose log FILE is, and where its heads were recorded")
    if action != "verify" and (head or archive is not None):
        raise InputError(
            f"--head, --archive and --facility have no effect on audit {action}: they are for audit verify"
        )
    if action == "head":
        print(head_of(file))
        return
    if action == "compare":
        text, code = compare_logs(file, others or [])
    else:
        text, code = verify_heads(file, [*(head or []), *(heads_of(archive, facility) if archive is not None else [])])
    print(text)
    raise typer.Exit(code)
