"""The rehearsals of large models one after the other, within so many minutes. Prints JSON.

    python tests/bench/rehearsals.py --device cuda --minutes 9 [--work DIR] [--out FILE]
    python tests/bench/rehearsals.py --tiny                        the same with tiny models, on a CPU

1.1 B parameters, all of them trained by Adafactor, and LoRA; 8 B by LoRA whose base stays at the facilities: two
facilities, two rounds each. Then 3 B through everything but the training, three facilities, three rounds. A rehearsal
for which time or disk does not suffice is left out and says so, as does one that is stopped; the JSON is written after
each, so that nothing is lost with the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.asked import names_of
from tests.bench.rehearsal import device_name, in_a_folder, needed


@dataclass(frozen=True, kw_only=True)
class Part:
    """One rehearsal, and the seconds that it may begin with."""

    kind: str
    size: str
    facilities: int
    rounds: int
    least_seconds: float


PARTS = (
    Part(kind="full", size="1.1b", facilities=2, rounds=2, least_seconds=60),
    Part(kind="lora", size="1.1b", facilities=2, rounds=2, least_seconds=45),
    Part(kind="lora", size="8b", facilities=2, rounds=2, least_seconds=100),
    Part(kind="perturb", size="3b", facilities=3, rounds=3, least_seconds=100),
)
TINY_SECONDS = 5.0
"""As `least_seconds`, of tiny models."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--minutes", type=float, default=9.0, help="of all together (default 9)")
    parser.add_argument("--tiny", action="store_true", help="tiny models in place of large ones")
    parser.add_argument(
        "--parts", type=names_of(map(str, range(len(PARTS)))), help="of the rehearsals, by commas (default: all)"
    )
    parser.add_argument("--work", type=Path, help="where folders are made (default: the system's temporary one)")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    a = parser.parse_args()
    end = time.monotonic() + 60 * a.minutes
    result: dict[str, Any] = {"device": device_name(a.device), "cores": os.cpu_count(), "rehearsals": {}}
    chosen = [PARTS[int(number)] for number in a.parts] if a.parts else list(PARTS)
    for part in chosen:
        left, name = end - time.monotonic(), f"{part.kind}-{part.size}"
        size = "tiny" if a.tiny else part.size
        room, wanted = shutil.disk_usage(a.work or tempfile.gettempdir()).free, needed(part.kind, size, part.facilities)
        least = TINY_SECONDS if a.tiny else part.least_seconds
        if left < least:
            found: dict[str, Any] = {"left_out": f"{max(left, 0):.0f} s were left, it takes {least:.0f} or more"}
        elif room < wanted:
            found = {"left_out": f"{room / 1e9:.0f} GB of disk are free, it may take {wanted / 1e9:.0f}"}
        else:
            found = attempt(part, size, a.work, a.device, left / 60)
        result["rehearsals"][name] = found
        text = json.dumps(result, indent=2)
        print(f"{name}: {found.get('ended') or found}", file=sys.stderr, flush=True)
        if a.out:
            a.out.write_text(text + "\n")
    print(text)
    return os.EX_OK


def attempt(part: Part, size: str, work: Path | None, device: str, minutes: float) -> dict[str, Any]:
    """One rehearsal; why it failed, where it did."""
    try:
        return in_a_folder(work, part.kind, size, part.facilities, part.rounds, device=device, minutes=minutes)
    except Exception as error:
        return {"ended": f"{type(error).__name__}: {str(error)[-1500:]}"}


if __name__ == "__main__":
    sys.exit(main())
