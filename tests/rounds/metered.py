"""A facility's job and its trainer on a machine whose energy counters are files: `COUNTERS/begin` as they are when the
job begins, `COUNTERS/end` as they are after training; COUNTERS is the folder `counters` in the facility's dataset.

`python -m tests.rounds.metered` is the job (arguments of `facility.round`); with a rank it is the trainer.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from facility.round import main as run_round
from facility.rounds import energy
from tests import stand_in_trainer

JOB = "4711"


def counters() -> Path:
    """Of the dataset among this process's arguments."""
    return Path(sys.argv[sys.argv.index("--dataset") + 1]) / "counters"


def turn_to(moment: str) -> None:
    """Show the counters of a moment."""
    now = counters() / "now"
    shutil.rmtree(now, ignore_errors=True)
    shutil.copytree(counters() / moment, now)


def main() -> int:
    if "RANK" in os.environ:
        turn_to("end")
        return stand_in_trainer.main()
    turn_to("begin")
    now = counters() / "now"
    energy.PM_COUNTER, energy.RAPL = now / "energy", now
    if (now / "sacct.txt").exists():  # accounting answers for this job alone
        program = counters() / "bin" / "sacct"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\n[ "$2" = {JOB} ] && cat "{now}/sacct.txt"\n')
        program.chmod(0o755)
        os.environ |= {"SLURM_JOB_ID": JOB, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    return run_round([*sys.argv[1:], "--module", "tests.rounds.metered"])


if __name__ == "__main__":
    sys.exit(main())
