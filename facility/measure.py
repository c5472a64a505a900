"""Measure this allocation for the planner: devices, layers of the model, links. Writes profile.json.

    python -m facility.measure --model DIR --out profile.json                         one process
    python -m facility.launch -- -m facility.measure --model DIR --out profile.json   all ranks of an allocation

Every rank times each kind of unit of the model (embedding, blocks, head), forwards and backwards, at the given
micro-batch sizes; then all pairs of ranks measure latency and bandwidth in both directions in a round robin, and groups
of ranks load their common ways out. Unequal devices and links can be emulated for rehearsal. The result is a planning
problem without a batch: `python -m coordinator.plan` takes it together with a batch size.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

from facility.exchange.command_line import changed_options, parse_arguments, refuse_unused
from facility.exchange.errors import ConfigurationError
from facility.exchange.files.compiled_code import compiled_code_place
from facility.exchange.logs import add_log_options
from facility.exchange.seeds import check_seed
from facility.measuring.names import DISTRIBUTIONS, TASKS

BOUNDS = {"threads": (0, 4096), "repeats": (1, 10_000), "warmup": (0, 10_000)}
"""Least and most of numbers of the command line: beyond, nothing would ever come of a measurement."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m facility.measure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--model", type=Path, required=True, help="Hugging Face checkpoint; only its config.json is read")
    top.add_argument("--out", type=Path, required=True, help="profile.json to write")
    top.add_argument(
        "--task", choices=TASKS, default="causal-lm", help="what the model is trained for (default causal-lm)"
    )
    top.add_argument(
        "--tokens", type=int, default=0, help="length of a sequence, tokens (default: 1024, or the model's most)"
    )
    top.add_argument("--samples", default="1,2", help="micro-batch sizes to time, sequences (default 1,2)")
    top.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of forward and backward (default float32)",
    )
    top.add_argument("--repeats", type=int, default=5, help="timed runs, of which the median counts (default 5)")
    top.add_argument("--warmup", type=int, default=2, help="runs before those (default 2)")
    top.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: count CPU time, for rehearsals whose ranks share cores (default wall)",
    )
    top.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto)")
    top.add_argument(
        "--threads", type=int, default=0, help="CPU threads a rank; 0: cores / ranks of the node (default 0)"
    )
    top.add_argument("--site", default="", help="name of this site (default: the host's name)")
    top.add_argument("--groups", default="", help="rehearsal: the group (host or site) of every rank, such as a,a,b,b")
    top.add_argument(
        "--most-megabytes", type=float, default=64.0, help="largest message between two ranks, MB (default 64)"
    )
    top.add_argument("--timeout", type=float, default=600.0, help="a hung peer is noticed after, seconds (default 600)")
    top.add_argument("--pretend", type=Path, help="file of factors, stalls, memory and links to emulate (JSON)")
    top.add_argument("--pretend-devices", choices=DISTRIBUTIONS, help="draw unequal devices from a distribution")
    top.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    top.add_argument("--tc-interface", default="eth0", help="for the tc scripts (default eth0)")
    top.add_argument(
        "--tc-out", type=Path, help="directory for one `tc` script a rank that makes the emulated links real (root)"
    )
    top.add_argument("--json", action="store_true", help="print the profile as JSON")
    add_log_options(top)
    return top


def main(arguments: list[str] | None = None) -> int:
    """Measure; the first rank writes. Raises `CrossFedError` for bad input."""
    line = parser()
    options = parse_arguments(line, arguments)
    if options.tc_out is None:
        refuse_unused(changed_options(line, options), ("tc_interface",), "without --tc-out")
    for name, (least, most) in BOUNDS.items():
        if not least <= (given := getattr(options, name)) <= most:
            raise ConfigurationError(f"--{name} is {str(given):.20}, expected {least} to {most}")
    for name in ("most_megabytes", "timeout"):
        if not 0 < (number := getattr(options, name)) < math.inf:
            raise ConfigurationError(f"--{name.replace('_', '-')} is {number:g}, expected a number above 0")
    check_seed(options.seed)
    os.environ.update(compiled_code_place())
    from facility.measuring.allocation import measure_allocation  # imports torch and transformers, which takes seconds

    return measure_allocation(options)


if __name__ == "__main__":
    parser().parse_args()  # help and mistakes are answered at once
    from facility.training.processes.ranks import run_and_exit  # imports torch

    run_and_exit(main)
