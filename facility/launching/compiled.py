"""Where torch keeps what `layout.compile` compiles: it locks files there, and TMPDIR may have no locks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from facility.exchange.files.durable import scratch_directory
from facility.exchange.files.locks import temporary_place

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def place_of_compiled(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """What ranks of this node get beside `environment`: a folder in the node's memory, gone at the end, where TMPDIR
    has no locks and no folder is named; else nothing."""
    place = temporary_place()
    if environment.get(VARIABLE) or place == tempfile.gettempdir():
        yield {}
        return
    with scratch_directory(Path(place) / f"crossfed-compiled-{os.getuid()}") as folder:
        yield {VARIABLE: str(folder)}
