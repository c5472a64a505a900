"""How long a federation takes whose rounds wait for all, close at a quorum, or ask each facility for other steps.

    python -m tests.bench.waiting [--unit 0.2] [--rounds 20] > waiting.json

Four facilities, one of them four times slower. `closing` runs the coordinator's own closing of rounds (the code that
`streamflow run` uses) with jobs that sleep, `simulator` the simulator of federations with the same times; neither has
an engine, transfers or learning. `even` is computed from the steps that `rounds: {steps: auto}` asks for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

from streamflow.core.workflow import Status

from coordinator.archive.rounds import FacilityRow, RoundFile
from coordinator.config.closing import ClosingSettings, EvenSettings
from coordinator.simulation.described import Scenario, Site
from coordinator.simulation.facilities import simulate_federation
from coordinator.steps.even import steps_ahead
from coordinator.streamflow_plugin.closing import INPUT, Closing
from coordinator.streamflow_plugin.errand import Errand
from tests.bench.asked import at_least

SPEEDS = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 4.0}
"""Units of time that a round's work takes."""
DONE = SimpleNamespace(status=Status.COMPLETED, exit_code=0)


def closing_units(settings: ClosingSettings, *, rounds: int, most_late: int, unit: float) -> tuple[float, int]:
    """Units that `rounds` take under the real closing, and the updates that were used."""
    closing = Closing(settings, rounds=rounds, facilities=len(SPEEDS), most_late=most_late)
    used = 0

    async def step(name: str, number: int) -> None:
        nonlocal used
        job: Any = SimpleNamespace(
            name=f"/rounds/train_{name}/0.{number}", inputs={INPUT: SimpleNamespace(value=number)}
        )

        async def reach() -> None:
            return None

        async def execute() -> Any:
            await asyncio.sleep(SPEEDS[name] * unit)
            return DONE

        async def find(late: object) -> None:
            return None

        errand = Errand(facility=name, reach=reach, execute=execute, directory=lambda: "there", find=find)
        delivered = await closing.run(job, errand) is not None
        used += delivered

    async def everything() -> float:
        begin = time.monotonic()
        for number in range(rounds):
            await asyncio.gather(*(step(name, number) for name in SPEEDS))
        return (time.monotonic() - begin) / unit

    return asyncio.run(everything()), used


def simulated_units(policy: str, *, rounds: int) -> float:
    sites = [Site(name=name, train_seconds=seconds) for name, seconds in SPEEDS.items()]
    quorum = {"quorum": 3} if policy == "quorum" else {}
    federation = Scenario(rounds=rounds, facilities=sites, policy=policy, **quorum)  # type: ignore[arg-type]
    return float(simulate_federation(federation).seconds)


def even_units(*, rounds: int, steps: int = 100) -> float:
    """Units that `rounds` take with steps asked for anew after each: the first as the settings say."""
    nominal = dict.fromkeys(SPEEDS, steps)
    asked, history, total = nominal, [], 0.0
    for number in range(rounds):
        seconds = {name: SPEEDS[name] * asked[name] / steps for name in SPEEDS}
        total += max(seconds.values())
        rows = [_row(number, name, asked[name], seconds[name]) for name in SPEEDS]
        entry = RoundFile(round=number, facilities=rows, global_loss=None, decision="go on")
        history.append(entry)
        asked = steps_ahead(EvenSettings(steps="auto"), nominal, history, []).steps
        history[-1] = RoundFile(round=number, facilities=rows, global_loss=None, decision="go on", next_steps=asked)
    return total


def _row(number: int, name: str, steps: int, seconds: float) -> FacilityRow:
    return FacilityRow(
        round=number,
        facility=name,
        status="ok",
        steps=steps,
        samples=steps,
        tokens=steps,
        tokens_per_second=steps / seconds,
        seconds=seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unit", type=float, default=0.2, help="seconds of one unit (default 0.2)")
    parser.add_argument("--rounds", type=at_least(1), default=20, help="rounds (default 20)")
    arguments = parser.parse_args()
    rounds, unit = arguments.rounds, arguments.unit
    waiting = max(SPEEDS.values()) * rounds
    found: dict[str, Any] = {"rounds": rounds, "units_waiting_for_all": waiting, "closing": {}, "simulator": {}}
    for name, grace, most_late in (
        ("grace 0, keep_rounds 3", 0.0, 2),
        ("grace 0, keep_rounds 9", 0.0, 8),
        ("grace auto, keep_rounds 9", "auto", 8),
    ):
        settings = ClosingSettings(quorum=3, grace=grace, late="carry")  # type: ignore[arg-type]
        units, used = closing_units(settings, rounds=rounds, most_late=most_late, unit=unit)
        found["closing"][name] = {"units": round(units, 2), "shorter": round(1 - units / waiting, 3), "updates": used}
    for policy in ("synchronous", "quorum"):
        units = simulated_units(policy, rounds=rounds)
        found["simulator"][policy] = {"units": round(units, 2), "shorter": round(1 - units / waiting, 3)}
    even = even_units(rounds=rounds)
    found["even"] = {"units": round(even, 2), "shorter": round(1 - even / waiting, 3)}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
