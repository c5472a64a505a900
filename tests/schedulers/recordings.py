"""What real schedulers answered: OpenPBS 23.06.06, flux-core 0.88, grid engine 8.1.9, word for word, in `recorded/`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "recorded"


@dataclass(frozen=True)
class Recording:
    """One command and its answer."""

    command: str
    out: str
    err: str
    code: int

    @property
    def texts(self) -> list[str]:
        """Both streams as one, in either order: which comes first depends on buffers."""
        return [self.out + self.err, self.err + self.out]


def recorded(name: str) -> Recording:
    lines = (FOLDER / f"{name}.cmd").read_text().splitlines()
    code = next(int(found[1]) for line in lines if (found := re.fullmatch(r"# exit code (\d+)", line)))
    return Recording(
        command="\n".join(line for line in lines if line and not line.startswith("# ")),
        out=_text(f"{name}.out"),
        err=_text(f"{name}.err"),
        code=code,
    )


def words_of_slurm() -> dict[str, dict[str, list[str]]]:
    """By version the words of squeue, sacct and scontrol: `flags` and `base` states in the order of job_state_string,
    and `reasons`, as they stand in SchedMD's repository (src/common/slurm_protocol_defs.c, job_state_reason.c)."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in (FOLDER / "slurm-words.txt").read_text().splitlines():
        version, kind, *words = line.split()
        found.setdefault(version, {})[kind] = words
    return found


def _text(file: str) -> str:
    path = FOLDER / file
    return path.read_text() if path.exists() else ""
