"""What a job asks its scheduler for, as the options of a deployment and the directives of its template say.

Directives are read as schedulers do (sbatch(1), qsub(1B)): quotes are the shell's, what follows a `#` is a comment, of
two that say the same the last counts, and none counts for Slurm and PBS below the first command of the script.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

PREFIX = re.compile(r"#(SBATCH|PBS|flux:|\$)(?=\s)")
UNTIL_A_COMMAND = ("SBATCH", "PBS")
VALUE = r"[= ](\S+)"
WHOLE = re.compile(r"[0-9]{1,9}")


def find_directive(template: str, pattern: str) -> str:
    """The first group of `pattern` in the template's last directive that has it, or ''.

    `pattern` is looked for in one line a directive, which begins with `#SBATCH`, `#PBS`, `#flux:` or `#$`; options are
    parted by one blank, and quotes and comments are gone.
    """
    found = [match[1] for line in _lines(template) for match in re.finditer(pattern, line)]
    return found[-1] if found else ""


def _lines(template: str) -> Iterator[str]:
    commands = False
    for line in re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL).splitlines():
        found = PREFIX.match(line)
        if found is None:
            commands = commands or not line.lstrip().startswith("#") and bool(line.strip())
        elif not commands or found[1] not in UNTIL_A_COMMAND:
            rest = line[found.end() :]
            try:
                words = shlex.split(rest, comments=True)
            except ValueError:  # a quote that is not closed
                words = rest.split()
            yield " ".join([found[0], *(re.sub(r"\s", "_", word) for word in words)])


def nodes_asked(options: Mapping[str, Any], template: str) -> int:
    """Nodes that the job asks for, the most of a range; 0 where nothing says."""
    nodes = str(
        options.get("nodes")
        or find_directive(template, r" --nodes[= ](\d+(?:-\d+)?)")
        or find_directive(template, r" -N ?(\d+(?:-\d+)?)(?=\s|$)")
        or _chunks(select_asked(options, template))
        or find_directive(template, r"#PBS(?:.*)[ ,]nodes=(\d+)")
    )
    last = nodes.split("-")[-1]
    return int(last) if last.isdecimal() else 0


def select_asked(options: Mapping[str, Any], template: str) -> str:
    """PBS's chunks of nodes, `2:ncpus=8:ngpus=4`, of its options or its directives; '' where neither has any."""
    return str((options.get("resources") or {}).get("select") or find_directive(template, r"select=(\S+)"))


def gpus_asked(options: Mapping[str, Any], template: str) -> int:
    """GPUs of one node that the job asks for, the most where nodes differ; 0 where nothing says."""

    def said(option: str, pattern: str) -> str:
        return str(options.get(option) or find_directive(template, pattern))

    if chunks := select_asked(options, template):
        counts = [int(count) for count in re.findall(r"\bngpus=(\d{1,9})", chunks)]
        if counts or "select" in (options.get("resources") or {}):
            return max(counts, default=0)
    nodes = nodes_asked(options, template) or 1
    if count := _count(said("gpusPerNode", " --gpus-per-node" + VALUE)):
        return count
    gres = said("gres", " --gres" + VALUE).split(",")
    if count := sum(_count(one.partition(":")[2] or "1") for one in gres if re.match(r"gpu(?![^:(])", one)):
        return count
    if each := _count(said("gpusPerTask", " --gpus-per-task" + VALUE)):
        tasks = _whole(
            said("ntasksPerNode", " --ntasks-per-node" + VALUE) or said("tasksPerNode", " --tasks-per-node" + VALUE)
        )
        return each * (tasks or _share(said("ntasks", r" (?:--ntasks[= ]|-n ?)(\d+)(?=\s|$)"), nodes))
    if each := _count(said("gpusPerSlot", r"#flux:.* (?:--gpus-per-slot[= ]|-g ?)(\d+)")):
        return each * _share(said("nslots", r"#flux:.* (?:--nslots[= ]|-n ?)(\d+)"), nodes)
    if total := _count(said("gpus", r"#SBATCH.* (?:--gpus[= ]|-G ?)(\S+)")):
        return _share(str(total), nodes)
    return _whole(
        find_directive(template, r"\bngpus=(\d+)") or find_directive(template, r"#\$.* (?:-l )?(?:\S+,)?gpus?=(\d+)")
    )


def hours_asked(options: Mapping[str, Any], template: str) -> float:
    """Time limit of one job in hours; 0 where nothing says."""
    resources = options.get("resources") or {}
    seconds = str(  # PBS and grid engine: a plain number is seconds
        resources.get("walltime")
        or find_directive(template, r"walltime=([^\s,]+)")
        or find_directive(template, r"h_rt=([^\s,]+)")
    )
    if seconds.isdecimal():
        return float(seconds) / 3600
    text = str(
        options.get("time")
        or options.get("timeLimit")
        or find_directive(template, " (?:--time|--time-limit)" + VALUE)
        or find_directive(template, r"#(?:SBATCH|flux:).* -t ?(\S+)")
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


def _count(text: str) -> int:
    """GPUs in Slurm's `4`, `a100-sxm:4`, `a100:2,volta:2` or `gpu:a100:4(S:0-1)`; a type without a number is one."""
    total = 0
    for one in filter(None, text.split(",")):
        last = re.sub(r"\(.*", "", one).rpartition(":")[2]
        total += int(last) if WHOLE.fullmatch(last) else 1
    return total


def _whole(text: str) -> int:
    return int(text) if WHOLE.fullmatch(text) else 0


def _share(total: str, nodes: int) -> int:
    """The most of a total on one of the nodes; 1 where nothing is said."""
    return -(-_whole(total) // nodes) if _whole(total) else 1
