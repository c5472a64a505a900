"""What a folder holds now, asked of its server.

Asked for a name, a client of NFS says for half a minute and longer, from memory, that a file is absent which another
node has made meanwhile. Opening the folder makes it ask anew (nfs(5), "Directory entry caching" and "Close-to-open
cache consistency").
"""

from __future__ import annotations

import os
from pathlib import Path


def names_in(directory: Path) -> set[str]:
    """Names in a folder; none where it is absent, or cannot be read."""
    try:
        return set(os.listdir(directory))
    except OSError:
        return set()
