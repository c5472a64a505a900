"""Where torch keeps what `layout.compile` compiles: it locks files there, and TMPDIR may have no locks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from facility.exchange.files.compiled_code import VARIABLE, compiled_code_place
from facility.exchange.files.durable import scratch_directory
from facility.exchange.files.locks import temporary_place


@contextmanager
def place_of_compiled(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """What ranks of this node get beside `environment`: a folder in the node's memory, gone at the end, where TMPDIR
    has no locks; what `compiled_code_place` says where it has; nothing where a folder is named."""
    place = temporary_place()
    if environment.get(VARIABLE):
        yield {}
    elif place == tempfile.gettempdir():
        yield compiled_code_place()
    else:
        with scratch_directory(Path(place) / f"crossfed-compiled-{os.getuid()}") as folder:
            yield {VARIABLE: str(folder)}
