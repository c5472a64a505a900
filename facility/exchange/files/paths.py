"""Where files are: paths in settings files on the machine that reads them, and the files that ship with CrossFed.

A job starts in a directory of its own with HOME reset, so neither the working directory nor `~` means what the user
meant. A relative path counts from $CROSSFED_HOME (set by `env.sh`, which `facility/setup.sh` writes), or from the
checkout that holds this package, or, where a wheel was installed, from `~/crossfed`; `~` is the account's home from
the user database.

CWL tools, job templates and pinned versions are beside the packages in a checkout, and below `facility/_data` in a
wheel (`setup.py` copies them there): `shipped_path` finds them in both.
"""

from __future__ import annotations

import os
import pwd
from importlib.resources import files
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]
"""The folder that holds the packages: a checkout, or an environment's site-packages."""


def account_home() -> Path:
    """The account's home directory from the user database, whatever HOME says."""
    return Path(pwd.getpwuid(os.getuid()).pw_dir)


def home() -> Path:
    """The folder that relative paths count from."""
    if given := os.environ.get("CROSSFED_HOME"):
        return Path(given)
    return account_home() / "crossfed" if _data().is_dir() else CHECKOUT


def resolve_path(path: str) -> Path:
    """Absolute form of a path from a settings file on this machine."""
    if path == "~" or path.startswith("~/"):
        return account_home() / path[2:]
    return home() / path


def shipped_path(name: str) -> Path:
    """A file or folder that ships with CrossFed, such as `templates` or `constraints.txt`."""
    return (_data() if _data().is_dir() else CHECKOUT) / name


def _data() -> Path:
    """What a wheel carries besides Python; absent in a checkout."""
    return Path(str(files("facility"))) / "_data"
