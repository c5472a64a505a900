"""Where the engine's own steps on this machine work: in a folder of this run, which its end removes.

StreamFlow's is `streamflow` in the system's temporary folder. On a login node that belongs to the account that ran
first, and the last step of everybody else's run was refused it, after all rounds.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from streamflow.core.deployment import LocalTarget

from facility.exchange.files.durable import locked_sibling, remove_abandoned


def install() -> None:
    """Give targets without a folder that of this run."""
    if not hasattr(LocalTarget.__init__, "__wrapped__"):
        LocalTarget.__init__ = in_own_folder(LocalTarget.__init__)  # type: ignore[method-assign]


def in_own_folder(original: Callable[..., None]) -> Callable[..., None]:
    """`LocalTarget.__init__`, whose default is `engine_folder`."""

    @functools.wraps(original)
    def __init__(self: LocalTarget, workdir: str | None = None) -> None:
        original(self, workdir or engine_folder())

    return __init__


@functools.cache
def engine_folder() -> str:
    """A folder that only this account can enter; the end of this process removes it, that of a fork does not. What
    killed runs left goes first."""
    place, maker = Path(tempfile.gettempdir()) / "crossfed-engine", os.getpid()
    remove_abandoned(place)
    folder, _ = locked_sibling(place)  # the lock is held to the end of this process

    def remove() -> None:
        if os.getpid() == maker:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return str(folder)
