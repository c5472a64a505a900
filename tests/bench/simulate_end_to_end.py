"""The trainer under different plans on four gloo processes of unequal emulated speed. Prints JSON.

    python -m tests.bench.simulate_end_to_end [--factors 1,2,4,1] [--steps 4]

One problem (four devices, a small Llama, one batch) is planned by `even`, by `exact` (layers to devices, no more), by
placing first and splitting the layers best afterwards, and by `joint`; `facility.train` then runs each plan, with
every unit of the model sleeping as its device's factor says. Seconds a step are the trainer's own; beside them stands what
the simulator predicts for the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from coordinator.planning.problem import Problem
from coordinator.planning.read import problem_from_json
from coordinator.planning.solve import placed, solve
from coordinator.planning.stop import Stop
from coordinator.simulation.plans import simulate
from facility.exchange.plan import Plan, write_plan
from tests.distributed import free_port
from tests.pico import save_pico
from tests.training.federation import write_dataset, write_settings

BLOCKS, SEQUENCES = 10, 4
FORWARD_MS, BACKWARD_MS = 40.0, 80.0


def problem(factors: list[float]) -> tuple[Problem, list[list[float]]]:
    """Four devices; units that take 40 and 80 ms a sequence and block; the embedding and the head take less."""
    count = len(factors)
    hidden = 64 * 32 * 4 / 1e6
    kinds = [("embedding", 1, 0.1), ("block", BLOCKS, 1.0), ("head", 1, 0.5)]
    units = [
        {
            "kind": kind,
            "count": number,
            "parameter_megabytes": 0.04,
            "activation_megabytes": hidden,
            "stored_megabytes": 10 * hidden,
            "forward_ms": share * FORWARD_MS,
            "backward_ms": share * BACKWARD_MS,
        }
        for kind, number, share in kinds
    ]
    raw = {
        "format": 1,
        "devices": [{"id": f"rank{r}", "slowdown": f, "memory_gigabytes": 4} for r, f in enumerate(factors)],
        "links": {
            "latency_ms": [[0.5] * count for _ in range(count)],
            "bandwidth_megabytes_per_second": [[200] * count for _ in range(count)],
        },
        "units": units,
        "batch_samples": SEQUENCES,
        "micro_batch_samples": [1],
        "schedules": ["gpipe", "1f1b"],
        "syncs": ["allreduce"],
    }
    sleeps = [[s * FORWARD_MS / 1e3, s * BACKWARD_MS / 1e3] for _, number, s in kinds for _ in range(number)]
    found = problem_from_json(raw)
    assert isinstance(found, Problem)
    return found, sleeps


def run(plan: Plan, name: str, folder: Path, factors: list[float], sleeps: list[list[float]], steps: int) -> float:
    """Seconds a step of the trainer under `plan`."""
    write_plan(folder / f"{name}.json", plan)
    settings = write_settings(folder / f"{name}-settings.json", rounds=1, steps=steps, batch_sequences=SEQUENCES, evaluation_sequences=4)  # fmt: skip
    out = folder / f"update-{name}"
    command = [sys.executable, "-m", "tests.bench.slow_rank", "--model", str(folder / "model"), "--dataset", str(folder / "data"),
               "--settings", str(settings), "--round", "0", "--out", str(out), "--plan", str(folder / f"{name}.json"),
               "--state", str(folder / f"state-{name}")]  # fmt: skip
    port, world = free_port(), len(factors)
    processes = []
    for rank in range(world):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "SLOW_FACTORS": ",".join(map(str, factors)), "SLOW_UNITS": json.dumps(sleeps),
        }  # fmt: skip
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))  # fmt: skip
    try:
        for process in processes:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return float(report["seconds"]["train"]) / steps


def main() -> int:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--factors", default="1,2,4,1", help="slowness of the four ranks (default 1,2,4,1)")
    top.add_argument("--steps", type=int, default=4, help="optimizer steps a plan (default 4)")
    top.add_argument("--plans", default="even,exact,place then exact split,joint", help="which, with commas (default all)")  # fmt: skip
    options = top.parse_args()
    factors = [float(f) for f in options.factors.split(",")]
    whole, sleeps = problem(factors)
    plans = {
        "even": solve(whole, Stop(seconds=2), method="even"),
        "exact": solve(whole, Stop(seconds=2), method="exact"),
        "place then exact split": placed(whole, 2, 2, Stop(seconds=2), split="best"),
        "joint": solve(whole, Stop(seconds=3), method="joint"),
    }
    plans = {title: plans[title] for title in options.plans.split(",")}
    rows = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_pico(folder / "model", num_hidden_layers=BLOCKS)
        write_dataset(folder / "data", train=SEQUENCES * (options.steps + 1), validation=8)
        for title, plan in plans.items():
            said = simulate(whole, plan, transport="blocking")
            rows[title] = {
                "stages": plan.stages,
                "replicas": plan.replicas,
                "grid": plan.grid,
                "stage_units": plan.stage_units,
                "micro_batches": plan.micro_batches,
                "schedule": plan.schedule,
                "simulated_seconds_a_step": round(said.iteration_seconds, 4),
                "real_seconds_a_step": round(run(plan, title.replace(" ", "-"), folder, factors, sleeps, options.steps), 4),
            }  # fmt: skip
    joint = rows["joint"]["real_seconds_a_step"]  # --plans must name it
    print(
        json.dumps(
            {
                "factors": factors,
                "blocks": BLOCKS,
                "sequences_a_step": SEQUENCES,
                "plans": rows,
                "real_speedup_of_joint_over": {
                    title: round(row["real_seconds_a_step"] / joint, 3) for title, row in rows.items()
                },
            },
            indent=2,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
