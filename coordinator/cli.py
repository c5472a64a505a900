"""`crossfed`: the commands a person types. Each is a thin call into a module of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coordinator.config.locate import find_federation
from coordinator.quickstart.command import quickstart
from facility import __version__
from facility.exchange.errors import InputError, exit_on_error
from facility.exchange.exit_codes import ExitCode
from facility.exchange.logs import LEVELS, configure_logging

SET_UP, RUN, WATCH, PLAN, REHEARSE = "Set up", "Run", "Watch", "Plan", "Rehearse"
"""Panels of `crossfed --help`."""

app = typer.Typer(
    name="crossfed",
    help="Cross-facility federated learning of foundation models, run as a CWL workflow.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
FederationOption = Annotated[
    Path,
    typer.Option(
        "--federation",
        "-f",
        default_factory=find_federation,
        show_default="./federation.yml, else ./workflow/federation.yml",
        help="The file that describes the federation.",
    ),
]


app.command(rich_help_panel=SET_UP)(quickstart)


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
        str, typer.Option(help=f"Least severe log message to print: {', '.join(LEVELS)}.")
    ] = "warning",
) -> None:
    if log_level not in LEVELS:
        raise InputError(f"--log-level is {log_level!r}, expected one of {', '.join(LEVELS)}")
    configure_logging("info" if verbose and log_level == "warning" else log_level)


@app.command(rich_help_panel=RUN)
def render(
    federation: FederationOption,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if a rendered file is stale.")] = False,
    paths: Annotated[bool, typer.Option(help="Refuse when the model or a local dataset is not there yet.")] = True,
) -> None:
    """Render federation.yml: streamflow.yml, settings.yml, coordinator.json, facilities/*.json and ../cwl/round.cwl.

    With groups, ../cwl/groups.cwl instead of round.cwl.
    """
    from coordinator.config.federation import check_paths, read_federation
    from coordinator.engine.render import stale, write

    described = read_federation(federation)
    if check:
        differing = stale(described)
        for name in differing:
            print(f"stale: {name}")
        raise typer.Exit(ExitCode.FOUND if differing else ExitCode.OK)
    if paths:
        check_paths(described)
    changed = write(described)
    print(f"{len(changed)} files written" if changed else "everything is up to date")
    for path in changed:
        print(f"  {path}")


@app.command(rich_help_panel=SET_UP)
def init(
    folder: Annotated[Path, typer.Argument(help="Folder in which to write workflow/federation.yml.")],
    facility: Annotated[
        list[str], typer.Option(help="NAME=TEMPLATE, such as a=leonardo or b=slurm; or NAME=local. Repeat.")
    ],
    name: Annotated[str, typer.Option(help="Name of the federation.")] = "federation",
) -> None:
    """Write a first federation.yml to fill in, from the sites' templates."""
    from coordinator.config.scaffold import init as write_scaffold

    print(
        f"{write_scaffold(folder, name, facility)}: fill in what is in <angle brackets>, then: cd {folder}; crossfed "
        "check"
    )


@app.command(rich_help_panel=SET_UP)
def share(
    federation: FederationOption,
    weights: Annotated[bool, typer.Option("--weights", help="Send the model's weights too.")] = False,
    facility: Annotated[list[str] | None, typer.Option(help="Only this facility. Repeat.")] = None,
) -> None:
    """Send the model's tokenizer to every facility, which verifies it; what a facility holds already is not sent."""
    from coordinator.config.federation import read_federation
    from coordinator.share import share as send

    for one in send(read_federation(federation), weights=weights, only=facility or []):
        print(f"{one.facility}: {'sent' if one.sent else 'there'}: {one.path}, digest {one.digest}")


@app.command(rich_help_panel=WATCH)
def explain(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="A facility, `round N`, or a key of federation.yml such as training.sync.policy."),
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


@app.command(rich_help_panel=SET_UP)
def schema(
    out: Annotated[Path | None, typer.Option(help="File to write; without it, the schema is printed.")] = None,
) -> None:
    """Print or write the JSON schema of federation.yml, by which editors complete and check the file."""
    from coordinator.config.schema import schema_text, write_schema

    print(schema_text(), end="") if out is None else write_schema(out)


@app.command(rich_help_panel=SET_UP)
def model(
    source: Annotated[
        str, typer.Argument(help="Model of the hub (ORG/NAME), or a Hugging Face checkpoint's directory.")
    ],
    out: Annotated[Path, typer.Option(help="Directory to make.")],
    dtype: Annotated[str, typer.Option(help="Dtype that is sent: bfloat16, float16 or float32.")] = "bfloat16",
    revision: Annotated[str, typer.Option(help="Revision of a hub model.")] = "main",
) -> None:
    """Fetch or convert the model of round 0 and check it by loading it."""
    from coordinator.model import DTYPES, convert

    if dtype not in DTYPES:
        raise InputError(f"--dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    print(convert(source, out.resolve(), dtype=dtype, revision=revision))


@app.command(rich_help_panel=SET_UP)
def setup(
    facility: Annotated[str, typer.Argument(help="A facility of the federation.")],
    federation: FederationOption,
    bundle: Annotated[
        Path | None, typer.Option(help="Send this bundle (crossfed bundle), for a site without internet.")
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="After --: further arguments of facility/setup.sh, such as --no-self-check."),
    ] = None,
) -> None:
    """Set a facility up over ssh: send the code, run facility/setup.sh there, check itself through its queue."""
    from coordinator.config.federation import read_federation
    from coordinator.remote_setup import set_up

    set_up(read_federation(federation), facility, bundle=bundle, arguments=arguments or [])


@app.command(rich_help_panel=REHEARSE)
def demo(
    out: Annotated[Path, typer.Option(help="Folder to make the demo in.")] = Path("crossfed-demo"),
    quiet: Annotated[bool, typer.Option("--quiet", help="No live display; events as plain lines.")] = False,
) -> None:
    """Make and run a small federation of two facilities on this machine: five rounds, a minute or two, no download."""
    from coordinator.demo import make_federation
    from coordinator.engine.run import run_federation

    raise typer.Exit(run_federation(make_federation(out), live=not quiet and sys.stdout.isatty()))


@app.command(rich_help_panel=RUN)
def check(
    federation: FederationOption,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    link: Annotated[bool, typer.Option(help="Measure each link by sending 16 MB.")] = True,
) -> None:
    """Check what can be known before a job is submitted; each failing row comes with a fix. Exit 1 if one fails."""
    from coordinator.preflight.check import check as look
    from coordinator.preflight.check import show

    console = Console(width=None if sys.stdout.isatty() else 160)
    raise typer.Exit(show(look(federation, link=link), as_json=as_json, console=console))


@app.command(rich_help_panel=SET_UP)
def bundle(
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    python_version: Annotated[str, typer.Option(help="Python at the facility.")] = "3.11",
    platform: Annotated[str, typer.Option(help="Its platform's wheel tag.")] = "manylinux_2_28_x86_64",
    torch: Annotated[str, typer.Option(help="cuda, rocm or cpu.")] = "cuda",
    torch_index: Annotated[str, typer.Option(help="Extra package index for torch; default PyTorch's own.")] = "",
    sbom: Annotated[bool, typer.Option("--sbom", help="Also write sbom.json: the packages as CycloneDX.")] = False,
) -> None:
    """Download what a facility without internet needs to install; copy the folder there and run its setup.sh."""
    from coordinator.bundle import INDEX
    from coordinator.bundle import bundle as make

    if torch not in INDEX:
        raise InputError(f"--torch is {torch!r}, expected one of {', '.join(INDEX)}")
    what = make(out, python=python_version, platform=platform, torch=torch, index=torch_index, sbom=sbom)
    print(
        f"{out}: {len(what['files'])} wheels; there: bash crossfed/facility/setup.sh --wheelhouse wheelhouse\n"  # type: ignore[arg-type]
        f"setup.sh verifies every file, and prints the sha256 of SHA256SUMS: {what['sha256sums']}"
    )


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
    """Print rounds, facilities and perplexities from the archive; with --queues also why jobs wait and what to do."""
    from coordinator.archive.rounds import Archive
    from coordinator.archive.summary import shown, summary, table
    from coordinator.asynchronous import summary as account
    from coordinator.config.federation import read_federation

    described = read_federation(federation)
    if following:
        from coordinator.engine.follow_run import follow_run

        raise typer.Exit(follow_run(described.workdir_path, as_json=as_json))
    groups = described.groups is not None
    found = (account.summary if groups else summary)(Archive(described.archive_path))
    data = found | {"federation": described.name, "rounds_wanted": described.rounds}
    if queues:
        from coordinator.engine.queues import read_queues
        from coordinator.engine.stuck_jobs import present

        data["jobs"] = present(read_queues(described.file.parent / "streamflow.yml"))
    if as_json:
        print(json.dumps(data, indent=2, ensure_ascii=False))
        return
    console = Console(width=None if sys.stdout.isatty() else 140)
    if groups:
        told = ", ".join(f"{name} {one['rounds']}" for name, one in data["facilities"].items()) or "none"
        console.print(
            f"federation {described.name}: rounds of {described.rounds} by facility: {told}; in {data['archive']}"
        )
        console.print(account.table(data))
    else:
        console.print(
            f"federation {described.name}: {len(data['rounds'])} of {described.rounds} rounds are complete in "
            f"{data['archive']}"
        )
        if data["rounds"]:
            console.print(table(data))
    if data["stopped"]:
        console.print(f"stopped: {shown(data['stopped'])}", style="red", markup=False, highlight=False)
    for job in data.get("jobs", []):
        console.print(shown(" ".join(filter(None, job.values()))), markup=False, highlight=False)


@app.command(rich_help_panel=WATCH)
def report(
    federation: FederationOption,
    out: Annotated[
        Path | None, typer.Option(help="File to write; default report.html, .md or .json in the archive.")
    ] = None,
    format: Annotated[str, typer.Option(help="html, md or json.")] = "html",
) -> None:
    """Write the report of the federation so far: curves, timeline, traffic, cost, updates, failures, digests.

    HTML is one self-contained file that needs no network.
    """
    from coordinator.report.make import make_report

    print(make_report(federation, out, format))


@app.command(rich_help_panel=RUN)
def run(
    federation: FederationOption,
    quiet: Annotated[bool, typer.Option("--quiet", help="No live display; events as plain lines.")] = False,
    log: Annotated[Path | None, typer.Option(help="StreamFlow's whole log; default <workdir>/streamflow.log.")] = None,
    despite_check: Annotated[
        bool, typer.Option("--despite-check", help="Run even when a check of the coordinator's own part fails.")
    ] = False,
) -> None:
    """Run preflight checks, render, call `streamflow run`, show rounds and steps; rerun to resume after any stop."""
    from coordinator.config.federation import check_paths, read_federation
    from coordinator.engine.run import run_federation
    from coordinator.preflight.coordinator import check_here

    if not despite_check:
        described = read_federation(federation)
        check_paths(described)
        failing = [row for row in check_here(described)[0] if row.verdict == "fail"]
        if failing:
            told = "; ".join(f"{row.check}: {row.found} ({row.fix})" for row in failing)
            raise InputError(f"{told}. Correct this, or run with --despite-check")

    raise typer.Exit(run_federation(federation, live=not quiet and sys.stdout.isatty(), log=log))


@app.command(rich_help_panel=RUN)
def login(
    facility: Annotated[str, typer.Argument(help="A facility of the federation.")],
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
    from coordinator.archive.rewind import rewind as go_back
    from coordinator.archive.rewind import stateless
    from coordinator.archive.rounds import Archive
    from coordinator.config.federation import read_federation
    from coordinator.engine.run import only_one

    described = read_federation(federation)
    with only_one(described):
        archive = Archive(described.archive_path)
        aside = go_back(archive, to)
    print(f"round {to} comes next; what was made from it on is in {aside}")
    if stateless(archive, to):
        print(
            "the archive keeps the float32 master and the server optimizer's state of the newest round alone: "
            f"round {to} begins from its half-precision model and a fresh server optimizer"
        )


@app.command(rich_help_panel=PLAN)
def plan(
    problem: Annotated[
        Path, typer.Argument(help="Problem or measured profile (JSON), published case, or federation.yml.")
    ],
    out: Annotated[Path, typer.Option(help="Where the plan goes.")] = Path("plan.json"),
    method: Annotated[str | None, typer.Option(help="joint, place, exact, dynamic or even; default joint.")] = None,
    seconds: Annotated[float, typer.Option(help="Wall-clock seconds to search.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
    devices: Annotated[str | None, typer.Option(help="Named set of devices of a chain case.")] = None,
    batch_samples: Annotated[
        int | None,
        typer.Option(help="Samples of one step, where the problem does not say; of a round, for a federation."),
    ] = None,
    previous: Annotated[Path | None, typer.Option(help="Plan in use: change it only for --gain.")] = None,
    gain: Annotated[
        float, typer.Option(help="Least share of seconds to save before anything in use is changed.")
    ] = 0.05,
    queue: Annotated[
        list[str] | None, typer.Option(help="Wait in a facility's queue, NAME=SECONDS (federation.yml; repeat it).")
    ] = None,
) -> None:
    """Plan one facility: write plan.json, print the table, the grid and what would help.

    Of a federation.yml: how many steps each facility should make so that all end together, from its rounds so far.
    """
    from coordinator.plan import budget_of
    from coordinator.planning.show import show_plan
    from coordinator.planning.solve import solve
    from coordinator.planning.stop import Stop, on_interrupt
    from coordinator.problem.problem import Problem
    from coordinator.problem.read import read_problem
    from facility.exchange.files.durable import write_json
    from facility.exchange.messages.plan import read_plan, write_plan

    if (budget := budget_of(problem, queues=queue or [], samples=batch_samples, gain=gain)) is not None:
        write_json(out, budget.to_json())
        print(budget.table(), f"written to {out}", sep="\n")
        return
    defaults = {} if batch_samples is None else {"batch_samples": batch_samples}
    described = read_problem(problem, devices=devices, defaults=defaults)
    stop = Stop(seconds)
    with on_interrupt(stop):
        made = solve(
            described,
            stop,
            method=method,
            seed=seed,
            previous=None if previous is None else read_plan(previous),
            least_gain=gain,
        )
    write_plan(out, made)
    console = Console(width=None if sys.stdout.isatty() else 140)
    show_plan(made, described if isinstance(described, Problem) else None, console=console)
    print(f"written to {out}")


@app.command(
    rich_help_panel=REHEARSE,
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def testbed(context: typer.Context) -> None:
    """Rehearse on two real facilities on this machine (root): up, run, status, stop, start, shape, down."""
    from coordinator.testbed.__main__ import main as rehearse

    raise typer.Exit(rehearse(context.args))


def main() -> None:
    def call() -> int:
        result = app(standalone_mode=False)
        return result if isinstance(result, int) else 0

    def guarded() -> int:
        try:
            return call()
        except typer.Exit as stop:
            return stop.exit_code
        except typer.Abort:
            return ExitCode.INTERRUPTED

    import click

    try:
        sys.exit(exit_on_error(guarded))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
