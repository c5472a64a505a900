"""Plan a facility, or the work of a round over facilities: `python -m coordinator.plan --problem FILE --out FILE`.

The problem is a JSON file: devices, links and units (see coordinator/problem/problem.py; `facility.measure` writes
it), a published placement or chain case, or {"facilities": [...], "round_samples": N} for the work per round; or a
federation.yml, whose archive holds how long its rounds took: steps per facility, or with `rounds: {steps: elastic}`
what its jobs are expected to take.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.planning.budget import Budget, budget_from_json
from coordinator.planning.solve import DEFAULT_SECONDS, METHODS, solve
from coordinator.planning.stop import Stop, on_interrupt
from coordinator.problem.printable import read_printable
from coordinator.problem.problem import Problem
from coordinator.problem.read import AnyProblem, read_problem
from facility.exchange.command_line import changed_options, parse_arguments, refuse_unused
from facility.exchange.errors import ConfigurationError, InputError, exit_on_error
from facility.exchange.files.durable import write_json
from facility.exchange.json_values import note_in
from facility.exchange.logs import add_log_options
from facility.exchange.messages.plan import Plan, read_plan, write_plan
from facility.exchange.seeds import check_seed

if TYPE_CHECKING:
    from coordinator.steps.outlook import Outlook

LAYOUT_OPTIONS = (
    *("method", "seconds", "iterations", "seed", "devices", "order", "stages", "replicas"),
    *("previous", "federation", "facility", "any_devices"),
)
"""Options that only the plan of a layout has a use for."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = argparse.ArgumentParser(
        prog="python -m coordinator.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    line.add_argument("--problem", type=Path, required=True, help="problem, measured profile or published case (JSON)")
    line.add_argument("--out", type=Path, required=True, help="where plan.json goes; appears atomically")
    line.add_argument(
        "--method", choices=METHODS, help="default: joint, or place / exact for a case that holds no more"
    )
    line.add_argument(
        "--seconds", type=float, default=DEFAULT_SECONDS, help="wall-clock seconds to search (default: %(default)s)"
    )
    line.add_argument("--iterations", type=int, help="rounds of search at most (default: no limit but --seconds)")
    line.add_argument("--seed", type=int, default=0, help="seed of the search (default: %(default)s)")
    line.add_argument("--devices", help="named set of devices of a chain case, such as config-64")
    line.add_argument("--order", choices=("free", "given"), default="free", help="exact: order of devices")
    line.add_argument("--stages", type=int, help="only this many stages")
    line.add_argument("--replicas", type=int, help="only this many replicas")
    line.add_argument("--batch-samples", type=int, help="samples of one optimizer step, where the problem does not say")
    line.add_argument("--previous", type=Path, metavar="PLAN", help="plan in use: change it only for a stated gain")
    line.add_argument(
        "--gain",
        type=float,
        default=0.05,
        help="with --previous: least share of seconds to save (default: %(default)s)",
    )
    line.add_argument(
        "--queue",
        action="append",
        default=[],
        metavar="NAME=SECONDS",
        help="for a federation.yml: wait in a facility's queue (repeat it)",
    )
    line.add_argument(
        "--federation",
        type=Path,
        metavar="FEDERATION.YML",
        help="with --facility: memory of what that facility trains (adapters, a base in 4 bits or half precision)",
    )
    line.add_argument("--facility", help="whose training settings --federation is read for")
    line.add_argument(
        "--any-devices",
        action="store_true",
        help="leave the devices' names out of the plan: the trainer then takes any allocation of that many devices",
    )
    line.add_argument("--json", action="store_true", help="print the plan as JSON")
    add_log_options(line)
    return line


def main(arguments: list[str] | None = None) -> int:
    """Read, solve, write; the first SIGINT ends the search and writes the best so far."""
    line = parser()
    given = parse_arguments(line, arguments)
    check_search(given.out, seconds=given.seconds, seed=given.seed)
    if given.iterations is not None and given.iterations < 0:
        raise ConfigurationError(f"--iterations is {given.iterations}, expected 0 or more")
    stop = Stop(given.seconds, given.iterations)
    work = work_of(given.problem, queues=given.queue, samples=given.batch_samples, gain=given.gain)
    check_options(given.problem, work, changed_options(line, given))
    if work is not None:
        write_steps(given.out, work)
        print(json.dumps(work.to_json()) if given.json else work.table())
        return 0
    with on_interrupt(stop):
        plan, _ = solve_for(
            given.problem,
            stop,
            federation=given.federation,
            facility=given.facility,
            devices=given.devices,
            batch_samples=given.batch_samples,
            method=given.method,
            seed=given.seed,
            order=given.order,
            stages=given.stages,
            replicas=given.replicas,
            previous=None if given.previous is None else read_plan(given.previous),
            least_gain=given.gain,
        )
        if given.any_devices:
            plan = replace(plan, device_ids=())
        write_plan(given.out, plan)
    if given.json:
        print(json.dumps(plan.to_json()))
    else:
        print(f"{plan.method}: {plan.extent}, {plan.objective or 'cost'} {plan.cost:.6g}")
        bound = f"; lower bound {plan.lower_bound_seconds:.6g}" if plan.lower_bound_seconds else ""
        proven = " (proven optimal)" if plan.gap == 0 else f", gap {plan.gap:.1%}" if plan.gap is not None else ""
        print(f"predicted {plan.predicted_seconds:.6g}{bound}{proven}; planned in {plan.seconds_used:.2f} s")
        for reason in plan.reasons:
            print(f"- {reason}")
    return 0


def check_search(out: Path, *, seconds: float, seed: int) -> None:
    """Raise `ConfigurationError` for what would end a search at once, or lose its plan at the end."""
    if not seconds > 0:
        raise ConfigurationError(f"--seconds is {seconds}, expected more than 0")
    check_seed(seed)
    if not out.parent.is_dir():
        raise ConfigurationError(f"--out {out}: there is not a directory {out.parent}; make it first")
    if out.is_dir():
        raise ConfigurationError(f"--out {out} is a directory, expected a file's name")


def check_options(path: Path, work: Budget | Outlook | None, given: Collection[str]) -> None:
    """Raise `InputError` for one of the options `given` that has no effect on the plan that the file `path` asks for:
    on the `work` of a round or, where that is None, on a layout."""
    if work is None:
        refuse_unused(given, ("queue",), "where a layout is planned: it is for a federation.yml")
        refuse_unused(given, () if "previous" in given else ("gain",), "without --previous")
        return
    refuse_unused(given, LAYOUT_OPTIONS, "where steps of a round are planned, which has no layout to search for")
    if path.suffix not in (".yml", ".yaml"):
        refuse_unused(given, ("queue", "batch_samples", "gain"), "beside a problem that holds its own facilities")
    elif not isinstance(work, Budget):
        refuse_unused(given, ("gain",), "with rounds.steps elastic")


def write_steps(out: Path, work: Budget | Outlook) -> None:
    """Write the steps of a round. Raises `ConfigurationError` rather than replace the plan of a layout, which trainers
    read."""
    try:
        read_plan(out)
    except (InputError, OSError):
        write_json(out, work.to_json())
        return
    raise ConfigurationError(f"{out} is the plan of a layout: expected another --out for the steps of a federation")


def solve_for(
    path: Path,
    stop: Stop,
    *,
    federation: Path | None = None,
    facility: str | None = None,
    devices: str | None = None,
    batch_samples: int | None = None,
    **options: Any,
) -> tuple[Plan, AnyProblem]:
    """Read a problem and plan it; with a federation and a facility's name, the memory of what that one trains.

    `options`: of `solve`. Returns the plan and the problem that was solved.
    """
    if (federation is None) != (facility is None):
        raise ConfigurationError("--federation and --facility go together: whose training shall be planned?")
    defaults = {} if batch_samples is None else {"batch_samples": batch_samples}
    if federation is None or facility is None:
        problem = read_problem(path, devices=devices, defaults=defaults)
        check_batch(problem, batch_samples, path)
        return solve(problem, stop, **options), problem
    from coordinator.config.federation import read_federation
    from coordinator.planning.for_training import batch_of_ranks, trained_at, with_memory, with_stated_memory

    trained = trained_at(read_federation(federation), facility, read_profile(path))
    problem = read_problem(
        path, devices=devices, defaults={"batch_samples": batch_of_ranks(trained.training)} | defaults
    )
    if not isinstance(problem, Problem):
        raise ConfigurationError(
            "--federation needs devices, links and units, as facility.measure writes them", file=path
        )
    check_batch(problem, batch_samples, path)
    wanted = with_memory(problem, trained)
    return with_stated_memory(solve(wanted, stop, **options), problem, trained), wanted


def check_batch(problem: AnyProblem, samples: int | None, path: Path) -> None:
    """Raise `ConfigurationError` where the file states another batch than `--batch-samples`, or knows none."""
    if samples is None or (stated := getattr(problem, "batch_samples", None)) == samples:
        return
    why = "which knows no batch" if stated is None else f"which states batch_samples {stated}: change it there"
    raise ConfigurationError(
        f"--batch-samples {samples} has no effect on this problem, {why}; leave the option out", file=path
    )


def read_profile(path: Path) -> dict[str, Any]:
    """A problem's file as plain values. Raises `ConfigurationError`."""
    raw = read_printable(path)
    if not isinstance(raw, dict):
        raise ConfigurationError(f"a problem is {raw!r:.60}, expected a mapping", file=path)
    return raw


def work_of(path: Path, *, queues: list[str], samples: float | None, gain: float) -> Budget | Outlook | None:
    """The work of a round, if the file asks for that: a federation.yml, or JSON with `facilities`; else None."""
    return outlook_of(path, queues=queues, samples=samples) or budget_of(
        path, queues=queues, samples=samples, gain=gain
    )


def outlook_of(path: Path, *, queues: list[str], samples: float | None) -> Outlook | None:
    """What a federation.yml with `rounds: {steps: elastic}` is to expect; None for every other file."""
    if path.suffix not in (".yml", ".yaml"):
        return None
    from coordinator.config.federation import read_federation

    federation = read_federation(path)
    if not federation.elastic:
        return None
    if samples is not None:
        raise ConfigurationError(
            "a round with rounds.steps elastic has the samples that training.steps asks for: change those in place of "
            "giving a number of samples here",
            file=path,
        )
    from coordinator.steps.outlook import outlook

    return outlook(federation, queues=_queues(queues))


def budget_of(path: Path, *, queues: list[str], samples: float | None, gain: float) -> Budget | None:
    """Steps with which all end together; None for a file that asks for no work of a round."""
    if path.suffix in (".yml", ".yaml"):
        from coordinator.config.federation import read_federation
        from coordinator.planning.work import plan_work

        return plan_work(read_federation(path), queues=_queues(queues), samples=samples, gain=gain)
    raw = note_in(path)  # read_problem says what is wrong
    return budget_from_json(read_printable(path), file=path) if isinstance(raw, dict) and "facilities" in raw else None


def _queues(texts: list[str]) -> dict[str, float]:
    found = {}
    for text in texts:
        name, _, seconds = text.partition("=")
        try:
            found[name] = float(seconds)
        except ValueError:
            raise ConfigurationError(f"--queue is {text!r}, expected NAME=SECONDS") from None
        if not 0 <= found[name] < math.inf:
            raise ConfigurationError(f"--queue is {text!r}, expected NAME=SECONDS with 0 seconds or more")
    return found


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
