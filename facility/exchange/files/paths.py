"""Paths in settings files, as a step understands them on the machine where it runs.

A job starts in a directory of its own with HOME reset, so neither the working directory nor `~` means what the user
meant. A relative path counts from $CROSSFED_HOME (set by `env.sh`, which `facility/setup.sh` writes), or from the
checkout that holds this package; `~` is the account's home from the user database.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]


def home() -> Path:
    """The folder that relative paths count from."""
    return Path(os.environ.get("CROSSFED_HOME") or CHECKOUT)


def resolve(path: str) -> Path:
    """Absolute form of a path from a settings file on this machine."""
    if path == "~" or path.startswith("~/"):
        return Path(pwd.getpwuid(os.getuid()).pw_dir) / path[2:]
    return home() / path
