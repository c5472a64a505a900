"""What a job asks its scheduler for, as the options of a deployment and the directives of its template say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def directive(template: str, pattern: str) -> str:
    """The first group of `pattern` in the template's directives, or ''."""
    lines = "\n".join(line for line in template.splitlines() if re.match(r"#(SBATCH|PBS|flux:|\$ )", line))
    found = re.search(pattern, lines)
    return found.group(1) if found else ""


def nodes_asked(options: Mapping[str, Any], template: str) -> int:
    """Nodes that the job asks for, the most of a range; 0 where nothing says."""
    nodes = str(
        options.get("nodes")
        or directive(template, r"--nodes[= ](\d+(?:-\d+)?)")
        or directive(template, r"(?:^|\s)-N ?(\d+(?:-\d+)?)(?=\s|$)")
        or _chunks(select_asked(options, template))
    )
    last = nodes.split("-")[-1]
    return int(last) if last.isdecimal() else 0


def select_asked(options: Mapping[str, Any], template: str) -> str:
    """PBS's chunks of nodes, `2:ncpus=8:ngpus=4`, of its options or its directives; '' where neither has any."""
    return str((options.get("resources") or {}).get("select") or directive(template, r"select=(\S+)"))


def hours_asked(options: Mapping[str, Any], template: str) -> float:
    """Time limit of one job in hours; 0 where nothing says."""
    resources = options.get("resources") or {}
    seconds = str(  # PBS and grid engine: a plain number is seconds
        resources.get("walltime")
        or directive(template, r"walltime=([^\s,]+)")
        or directive(template, r"h_rt=([^\s,]+)")
    )
    if seconds.isdecimal():
        return float(seconds) / 3600
    text = str(
        options.get("time")
        or options.get("timeLimit")
        or directive(template, r"--time[= ](\S+)")
        or directive(template, r"--time-limit[= ](\S+)")
        or directive(template, r"#(?:SBATCH|flux:)(?: .*)? -t ?(\S+)")
        or seconds
    )
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):  # Flux
        return float(found.group(1)) * {"s": 1 / 3600, "m": 1 / 60, "h": 1.0, "d": 24.0}[found.group(2)]
    days, dash, clock = text.rpartition("-")  # Slurm: minutes, minutes:seconds, h:m:s, days-h, days-h:m, days-h:m:s
    if not re.fullmatch(r"\d+(:\d+){0,2}", clock) or not re.fullmatch(r"\d*", days):
        return 0.0
    numbers = [float(part) for part in clock.split(":")]
    units = (1.0, 1 / 60, 1 / 3600) if dash or len(numbers) == 3 else (1 / 60, 1 / 3600)
    return 24 * float(days or 0) + sum(number * unit for number, unit in zip(numbers, units, strict=False))


def _chunks(select: str) -> str:
    """Chunks of a PBS `select`, each of which is on one node: `2:ncpus=8+4:ncpus=2` has six."""
    counts = [re.match(r"\d+", part) for part in select.split("+")] if select else []
    return str(sum(int(found.group()) if found else 1 for found in counts)) if counts else ""
