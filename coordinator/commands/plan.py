"""The command that plans a facility, or the work of a round over facilities."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordinator.commands.app import PLAN, app, given_options
from coordinator.console import command_console


@app.command(rich_help_panel=PLAN)
def plan(
    context: typer.Context,
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
    federation: Annotated[
        Path | None, typer.Option(help="federation.yml: with --facility, memory of what that facility trains.")
    ] = None,
    facility: Annotated[str | None, typer.Option(help="Whose training settings --federation is read for.")] = None,
    queue: Annotated[
        list[str] | None, typer.Option(help="Wait in a facility's queue, NAME=SECONDS (federation.yml; repeat it).")
    ] = None,
) -> None:
    """Plan one facility: write plan.json, print the table, the grid and what would help.

    Of a federation.yml: how many steps each facility should make so that all end together, from its rounds so far;
    with `rounds: {steps: elastic}` how many its jobs are expected to take, within which bounds, at what cost.
    """
    from coordinator.plan import check_options, check_search, solve_for, work_of, write_steps
    from coordinator.planning.show import show_plan
    from coordinator.planning.stop import Stop, on_interrupt
    from coordinator.problem.problem import Problem
    from facility.exchange.messages.plan import read_plan, write_plan

    check_search(out, seconds=seconds, seed=seed)
    work = work_of(problem, queues=queue or [], samples=batch_samples, gain=gain)
    check_options(problem, work, given_options(context))
    if work is not None:
        write_steps(out, work)
        print(work.table(), f"written to {out}", sep="\n")
        return
    with on_interrupt(stop := Stop(seconds)):
        made, described = solve_for(
            problem,
            stop,
            federation=federation,
            facility=facility,
            devices=devices,
            batch_samples=batch_samples,
            method=method,
            seed=seed,
            previous=None if previous is None else read_plan(previous),
            least_gain=gain,
        )
    write_plan(out, made)
    show_plan(made, described if isinstance(described, Problem) else None, console=command_console(140))
    print(f"written to {out}")
