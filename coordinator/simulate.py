"""`python -m coordinator.simulate`: how long a plan's iterations, or a federation's rounds, will take."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from coordinator.problem.problem import Problem
from coordinator.problem.read import read_problem
from coordinator.simulation.described import read_scenario
from coordinator.simulation.facilities import simulate_federation
from coordinator.simulation.pipelines.pictures import write_html, write_trace
from coordinator.simulation.pipelines.plans import simulate
from coordinator.simulation.pipelines.result import SimulationResult
from facility.exchange.command_line import changed_options, parse_arguments, refuse_unused
from facility.exchange.errors import ConfigurationError, exit_on_error
from facility.exchange.files.durable import write_json
from facility.exchange.logs import add_log_options
from facility.exchange.messages.emulation import Emulation, read_trace
from facility.exchange.messages.plan import read_plan
from facility.exchange.seeds import check_seed
from facility.exchange.text import number_of

MOST_ITERATIONS = 1_000_000
"""Each is a figure of the summary."""


PLAN_OPTIONS = (
    *("iterations", "stall_probability", "stall_seconds", "factors", "speeds"),
    *("transport", "no_overlap"),
)
"""Options of the iterations of a plan."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m coordinator.simulate", description=__doc__)
    what = top.add_argument_group("what to simulate: --problem with --plan, or --federation")
    what.add_argument("--problem", type=Path, help="problem file (JSON): devices, links, the model's units")
    what.add_argument("--plan", type=Path, help="plan.json as coordinator.plan writes it")
    what.add_argument(
        "--federation", type=Path, help="federation to simulate (JSON): facilities, queues, links, policy"
    )
    top.add_argument("--rounds", type=int, help="rounds of a federation (default: what its file says)")
    top.add_argument("--iterations", type=int, default=1, help="iterations of a plan (default 1)")
    top.add_argument("--seed", type=int, help="seed of the random stalls (default 0, or the federation's own)")
    top.add_argument(
        "--stall-probability", type=float, default=0.0, help="of a stall before each forward and backward (default 0)"
    )
    top.add_argument("--stall-seconds", type=float, default=0.0, help="length of a stall, seconds (default 0)")
    top.add_argument("--factors", default="", help="extra slowness by device, such as 1,1,2.5 (default: none)")
    top.add_argument(
        "--speeds", type=Path, help="trace file of speeds over time (only its first moment counts in an iteration)"
    )
    top.add_argument(
        "--transport",
        choices=("streaming", "blocking"),
        help="streaming: messages overlap computation; blocking: as torch.distributed.pipelining sends them (default: "
        "the problem's runtime.transport)",
    )
    top.add_argument("--no-overlap", action="store_true", help="replicas synchronise only after the last backward")
    top.add_argument("--out", type=Path, help="write the summary here (JSON)")
    top.add_argument("--trace", type=Path, help="write the first iteration as a Chrome trace (JSON)")
    top.add_argument("--html", type=Path, help="write the first iteration as a page with plotly")
    top.add_argument("--json", action="store_true", help="print the summary as JSON")
    add_log_options(top)
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run the command; raises `CrossFedError` for bad input."""
    line = parser()
    options = parse_arguments(line, arguments)
    changed = changed_options(line, options)
    check_seed(options.seed or 0)
    if options.federation is not None:
        refuse_unused(changed, PLAN_OPTIONS, "with --federation")
        return _federation(options)
    refuse_unused(changed, ("rounds",), "without --federation")
    if options.problem is None or options.plan is None:
        raise ConfigurationError("give --problem and --plan, or --federation")
    if not 1 <= options.iterations <= MOST_ITERATIONS:
        raise ConfigurationError(f"--iterations is {str(options.iterations):.40}, expected 1 to {MOST_ITERATIONS:,}")
    plan = read_plan(options.plan)
    batch = sum(plan.replica_micro_batches) * plan.micro_batch_samples
    problem = read_problem(options.problem, defaults={"batch_samples": batch})  # which a measured profile lacks
    if not isinstance(problem, Problem):
        raise ConfigurationError(
            f"a {type(problem).__name__} has no devices, links and units together; simulate a whole problem",
            file=options.problem,
        )
    emulation = Emulation(
        probability=options.stall_probability,
        seconds=options.stall_seconds,
        factors=_factors(options.factors),
        trace=read_trace(options.speeds) if options.speeds else {},
        seed=options.seed or 0,
    )
    result = simulate(
        problem,
        plan,
        iterations=options.iterations,
        emulation=emulation if emulation.active else None,
        transport=options.transport,
        overlap=False if options.no_overlap else None,
        timeline=bool(options.trace or options.html),
    )
    if options.trace:
        write_trace(options.trace, result.timeline)
    if options.html:
        write_html(options.html, result.timeline, f"{plan.schedule}, {plan.extent}")
    _deliver(result.to_json(), _table(result), options)
    return 0


def _federation(options: argparse.Namespace) -> int:
    if options.problem or options.plan:
        raise ConfigurationError("give --federation alone, or --problem and --plan")
    federation = read_scenario(options.federation)
    if options.rounds is not None:
        federation = dataclasses.replace(federation, rounds=options.rounds)
    if options.seed is not None:
        federation = dataclasses.replace(federation, seed=options.seed)
    result = simulate_federation(federation, timeline_rounds=3 if options.trace or options.html else 0)
    if options.trace:
        write_trace(options.trace, result.timeline)
    if options.html:
        write_html(options.html, result.timeline, f"{federation.size} facilities, {federation.policy}, first rounds")
    rows = [
        ("whole federation", f"{result.seconds / 3600:.4g} h for {number_of(result.rounds, 'round')}"),
        ("a round", f"{result.round_seconds:.6g} s"),
        ("updates", f"{result.updates}, {result.updates_per_hour:.5g} an hour"),
        *([("work", f"{24 * result.samples_per_hour:.5g} samples a day")] if federation.steps == "elastic" else []),
        ("jobs failed", f"{result.jobs_failed}; given up: {result.sat_out}"),
        ("training", f"{100 * result.training_share:.1f} % of the facilities' time"),
        ("in queues", f"{100 * result.queue_share:.1f} %"),
        ("transfers", f"{100 * result.transfer_share:.1f} %"),
        ("waiting for the round", f"{100 * result.waiting_share:.1f} %"),
    ]
    width = max(len(name) for name, _ in rows)
    _deliver(result.to_json(), "\n".join(f"{name:<{width}}  {value}" for name, value in rows), options)
    return 0


def _deliver(summary: dict[str, Any], text: str, options: argparse.Namespace) -> None:
    if options.out:
        write_json(options.out, summary)
    print(json.dumps(summary, indent=2, allow_nan=False) if options.json else text)


def _factors(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigurationError(f"--factors is {text!r}, expected numbers with commas, such as 1,1,2.5") from None


def _table(result: SimulationResult) -> str:
    rows = [
        ("iteration", f"{result.iteration_seconds:.6g} s"),
        ("  until the last backward", f"{result.pipeline_seconds:.6g} s"),
        ("  synchronising, not hidden", f"{result.sync_seconds:.6g} s"),
        ("  optimizer step", f"{result.update_seconds:.6g} s"),
        ("bubble", f"{100 * result.bubble_share:.1f} % of device time"),
        ("throughput", f"{result.samples_per_second:.6g} samples/s"),
        ("between stages", f"{result.pipeline_bytes / 1e6:.6g} MB an iteration"),
        ("between replicas", f"{result.sync_bytes / 1e6:.6g} MB an iteration"),
        ("most micro-batches in flight", f"{max(result.in_flight_micro_batches.values())}"),
    ]
    if result.memory_bytes:
        device = max(result.memory_bytes, key=lambda d: result.memory_bytes[d])
        rows.append(("most memory", f"{result.memory_bytes[device] / 2**30:.4g} GiB on device {device}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
