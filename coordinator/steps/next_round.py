"""What follows once a round is closed: the outputs of the `aggregate` and `start` steps."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class NextRound(NamedTuple):
    """What the loop of `cwl/main.cwl` goes on with."""

    model: Path
    """Directory of the model to train next; after the last round, of the one that the federation ends with."""
    number: int
    """Number of the round, from 0."""
    proceed: bool
    """Whether there is such a round; False ends the loop."""
