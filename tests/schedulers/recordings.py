"""What real schedulers answered: OpenPBS 23.06.06 and flux-core 0.88, word for word, in `recorded/`."""

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


def _text(file: str) -> str:
    path = FOLDER / file
    return path.read_text() if path.exists() else ""
