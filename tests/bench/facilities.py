"""What a round costs at the coordinator by the number of facilities, training left out. Prints JSON.

    python tests/bench/facilities.py [--facilities 2,16,64] [--rounds 3] [--out FILE]

Local facilities whose trainer is a stand-in (`lean_trainer.py`: the received weights come back), under
StreamFlow on this machine: everything else is what a user runs. CPU seconds are those of all processes, the stand-ins'
among them; of a further facility: beyond a federation of one, and beyond the number before it. Memory is the engine's
largest resident set.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from coordinator.archive.rounds import Archive
from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from tests.engine.engines import measured_environment
from tests.federations import write_federation

ROOT = Path(__file__).resolve().parents[2]
PROFILED = """
import cProfile, runpy, sys, time
out = sys.argv.pop(1)
profile = cProfile.Profile(time.thread_time)
sys.argv[0] = "streamflow"
try:
    profile.runcall(runpy.run_module, "streamflow", run_name="__main__")
finally:
    profile.dump_stats(out)
"""
"""The engine under a profile of its main thread's CPU seconds: what it waits for does not count."""


def run(facilities: int, rounds: int, profile: Path | None = None) -> dict[str, Any]:
    """One federation to its end: seconds, CPU seconds and the engine's largest resident set."""
    with tempfile.TemporaryDirectory(prefix="crossfed-facilities-") as folder:
        root = Path(folder)
        path = write_federation(root, ["site0"], rounds=rounds, final_evaluation=False)
        described = yaml.safe_load(path.read_text())
        described["facilities"] = [
            {"name": f"site{number}", "dataset": "../sites/site0/dataset"} for number in range(facilities)
        ]
        path.write_text(yaml.safe_dump(described, sort_keys=False))
        write_rendered(read_federation(path))
        tool = root / "cwl" / "tools" / "train.cwl"
        text = tool.read_text().replace(
            "update]", f"update, --module, tests.bench.lean_trainer, --state, {root}/state]"
        )
        tool.write_text(text)
        (root / "engine").mkdir()
        engine = [sys.executable, "-c", PROFILED, str(profile)] if profile else ["streamflow"]
        environment = measured_environment(root / "engine")
        home = root / "engine" / "home"  # the averaging is compiled once, not in every step's own directory
        environment["XDG_CACHE_HOME"] = str(home / ".cache")
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        with open(root / "log", "w") as log:
            process = subprocess.Popen(
                [*engine, "run", "--outdir", str(root / "engine" / "out"), "streamflow.yml"],
                cwd=path.parent,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            largest, own = 0, 0.0
            while process.poll() is None:
                largest, own = max(largest, resident(process.pid)), max(own, cpu_seconds(process.pid))
                time.sleep(0.2)
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        done = Archive(read_federation(path).archive_path).history()
        if process.returncode or len(done) != rounds or any(r.status != "ok" for e in done for r in e.facilities):
            said = (root / "log").read_text()
            failed = said.partition(" ERROR ")[2][:3000]  # the first, with what follows it
            raise SystemExit(f"{facilities} facilities did not end well: {failed or said[-3000:]}")
        return {
            "seconds": round(seconds, 1),
            "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
            "cpu_seconds_of_the_engine": round(own, 1),
            "engine_megabytes": round(largest / 1e6),
        }


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def cpu_seconds(pid: int) -> float:
    """Of one process without those it has started."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--facilities", default="2,16,64", help="numbers of facilities, by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", type=Path, help="where to write cProfile's figures of the engine with the last")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    least = run(1, arguments.rounds)
    runs: dict[int, dict[str, Any]] = {}
    earlier = (1, least["cpu_seconds"])
    numbers = [int(word) for word in arguments.facilities.split(",")]
    for number in numbers:
        figures = run(number, arguments.rounds, arguments.profile if number == numbers[-1] else None)
        more = (figures["cpu_seconds"] - least["cpu_seconds"]) / ((number - 1) * arguments.rounds)
        since = (figures["cpu_seconds"] - earlier[1]) / ((number - earlier[0]) * arguments.rounds)
        earlier = (number, figures["cpu_seconds"])
        runs[number] = figures | {
            "cpu_seconds_a_further_facility_and_round": round(more, 3),
            "beyond_the_number_before": round(since, 3),
        }
        print(number, json.dumps(runs[number]), file=sys.stderr, flush=True)
    text = json.dumps({"rounds": arguments.rounds, "cores": os.cpu_count(), "one": least, "facilities": runs}, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
