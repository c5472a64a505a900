"""What follows once a round is closed, and how the `aggregate` and `start` steps leave it for the workflow engine."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from facility.exchange.files.durable import write_json
from facility.exchange.files.links import link_tree


class NextRound(NamedTuple):
    """What the loop of `cwl/main.cwl` goes on with."""

    model: Path
    """Directory of the model to train next; after the last round, of the one that the federation ends with."""
    number: int
    """Number of the round, from 0."""
    proceed: bool
    """Whether there is such a round; False ends the loop."""

    def deliver(self) -> Path:
        """Write `cwl.output.json` in the working directory, with the model as `./model` (hard-linked: no bytes copied).

        Returns that directory.
        """
        target = Path.cwd() / "model"
        link_tree(self.model, target)
        write_json(
            Path.cwd() / "cwl.output.json",
            {"model": {"class": "Directory", "path": str(target)}, "round": self.number, "proceed": self.proceed},
        )
        return target
