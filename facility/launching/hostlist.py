"""Host lists and counts as schedulers abbreviate them, expanded without asking the scheduler.

`node[01-03,7],gpu1` (Slurm and Flux: https://slurm.schedmd.com/scontrol.html, `show hostnames`; Flux RFC 29) and
`4(x2),2` (SLURM_TASKS_PER_NODE: https://slurm.schedmd.com/sbatch.html). The package python-hostlist does the first
under the GPL, on which what a facility installs does not depend.
"""

from __future__ import annotations

import re

from facility.exchange.errors import ConfigurationError

LIMIT = 100_000


def expand_hosts(text: str) -> list[str]:
    """Host names in order. Raises `ConfigurationError` for what is not a host list."""
    hosts: list[str] = []
    for part in _split(text):
        if part.strip():
            hosts += _expand(part.strip(), text)
            if len(hosts) > LIMIT:
                raise ConfigurationError(f"the host list {text!r:.80} names more than {LIMIT} hosts")
    return hosts


def _split(text: str) -> list[str]:
    """Cut at commas and blanks outside brackets."""
    parts, depth, current = [], 0, ""
    for letter in text:
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if depth not in (0, 1):
            raise ConfigurationError(f"{text!r:.80} is not a host list: its brackets do not match")
        if depth == 0 and (letter == "," or letter.isspace()):
            parts.append(current)
            current = ""
        else:
            current += letter
    if depth:
        raise ConfigurationError(f"{text!r:.80} is not a host list: its brackets do not match")
    return [*parts, current]


def _expand(part: str, whole: str) -> list[str]:
    found = re.match(r"([^\[\]]*)\[([^\]]*)\](.*)", part, re.DOTALL)
    if found is None:
        return [part]
    head, ranges, tail = found.groups()
    names: list[str] = []
    for item in ranges.split(","):
        bounds = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", item)
        if bounds is None:
            raise ConfigurationError(f"{whole!r:.80} is not a host list: {item!r} is neither a number nor a range")
        first, last = bounds.group(1), bounds.group(2) or bounds.group(1)
        if int(last) - int(first) > LIMIT:
            raise ConfigurationError(f"the host list {whole!r:.80} names more than {LIMIT} hosts")
        names += [f"{head}{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    rest = _expand(tail, whole) if tail else [""]
    return [name + end for name in names for end in rest]


def expand_counts(text: str) -> list[int]:
    """`4(x2),2` -> [4, 4, 2]. Raises `ConfigurationError`."""
    counts: list[int] = []
    for item in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", item)
        if found is None or int(found.group(2) or 1) > LIMIT:
            raise ConfigurationError(
                f"{text!r:.80} is not a list of counts per node, expected something like '4(x2),2'"
            )
        counts += [int(found.group(1))] * int(found.group(2) or 1)
    return counts
