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
        or _chunks(directive(template, r"select=(\S+)"))
    )
    last = nodes.split("-")[-1]
    return int(last) if last.isdecimal() else 0


def _chunks(select: str) -> str:
    """Chunks of a PBS `select`, each of which is on one node: `2:ncpus=8+4:ncpus=2` has six."""
    counts = [re.match(r"\d+", part) for part in select.split("+")] if select else []
    return str(sum(int(found.group()) if found else 1 for found in counts)) if counts else ""
