"""Close a round, and die by SIGKILL between averaging and the commit: `python -m tests.steps.killed_commit`.

ARCHIVE PLACE UPDATE ...    PLACE: averaged (the model is written, the round's record is not), or renaming (all is
                            written and has not its name yet)
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from coordinator.archive.rounds import Archive
from coordinator.config.settings import CoordinatorSettings
from coordinator.steps import commit
from coordinator.steps.aggregate import close_round
from coordinator.steps.arrived import CollectedRound, sort_out
from facility.exchange.files import durable

SETTINGS = CoordinatorSettings(federation="f", rounds=2, facilities=["a", "b", "c"])


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    archive, place, *updates = sys.argv[1:]
    if place == "averaged":
        commit.describe_round = die
    else:
        synced = durable._fsync_files
        durable._fsync_files = lambda path: die() if path.name.startswith(".round-0000") else synced(path)
    found = Archive(Path(archive))
    close_round(
        CollectedRound(
            archive=found,
            settings=SETTINGS,
            model=found.model_for(0),
            number=0,
            arrived=sort_out([Path(one) for one in updates]),
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
