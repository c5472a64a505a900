"""Search paths of a gate and its jobs: the absolute folders of them, since any other is where a job runs.

The coordinator writes there. `LD_LIBRARY_PATH=/opt/lib:`, as modules and profiles leave it, has an empty element, which
is the working directory: every program of the job would load libraries from it, and Python modules by such a
PYTHONPATH.
"""

from __future__ import annotations

import os

NAMES = (
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
)
SHELL = (
    f'set -f; IFS=:; for n in {" ".join(NAMES)}; do eval "w=\\${{$n-}}"; r=; for e in $w; do '
    'case $e in /*) r=$r${r:+:}$e ;; esac; done; [ -z "$w" ] || export "$n=$r"; done; unset IFS; set +f'
)
"""One line for any POSIX shell, which starts no program."""


def keep_absolute() -> None:
    """Do for this process, and what it starts, what `SHELL` does for a job."""
    for name in NAMES:
        if name in os.environ:
            os.environ[name] = ":".join(one for one in os.environ[name].split(":") if one.startswith("/"))
