"""Where torch keeps what it compiles and loads again, which it runs as it lies there: a folder of this account alone.

Its own choice is `torchinductor_ACCOUNT` in the system's temporary folder. Whoever makes that folder first, on a node
that accounts share, exchanges what is in it; torch asks neither whose it is nor who may write it.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from facility.exchange.files.owners import not_ours
from facility.exchange.files.user_cache import ours_alone

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable which names the folder to torch."""
EVERYBODYS = stat.S_ISVTX | stat.S_IWOTH
"""Mode of a folder in which each account may make entries and remove its own."""


def compiled_code_place() -> dict[str, str]:
    """The variable that names torch such a folder. {} where the environment names one, and where the temporary folder
    is no one's but ours, as that of a job of the workflow is."""
    place = Path(tempfile.gettempdir())
    shared = place.stat().st_mode & EVERYBODYS == EVERYBODYS or not_ours(place)
    if os.environ.get(VARIABLE) or not shared:
        return {}
    folder = place / f"crossfed-compiled-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    return {VARIABLE: str(folder) if ours_alone(folder) else tempfile.mkdtemp(prefix="crossfed-compiled-")}
