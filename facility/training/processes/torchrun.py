"""Where the ranks of one torchrun agent on one node meet: a private directory that all of them can name.

torchrun's own store listens on every interface and admits whoever knows the port. All ranks of a node are children of
one agent; its process and that process's start name the directory, so no two runs share one, and one that somebody else
made first is refused (`rendezvous.private_directory`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

AGENT = "TORCHELASTIC_USE_AGENT_STORE"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"


def under_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a torchrun agent started this process and serves its store."""
    return environment.get(AGENT) == "True"


def agents_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """The directory of this process's siblings under one agent, made by the first of them with mode 0700."""
    agent, restarts = os.getppid(), environment.get(RESTARTS, "0")
    fields = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()
    started = fields[19]  # ticks since boot, field 22 of proc(5)
    name = f"crossfed-torchrun-{os.getuid()}-{agent}-{started}-{int(restarts)}"
    place = Path(tempfile.gettempdir()) / name
    place.mkdir(mode=0o700, exist_ok=True)
    return place
