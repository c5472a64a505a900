"""`native.c`, compiled where there is a C compiler; elsewhere numpy does the same work in more passes.

The library is stored beside Python's own compiled files (`__pycache__`), named by the digest of source, compiler and
processor, and is compiled by the first process that needs it. Where that folder cannot be written (an installation that
several share, PYTHONDONTWRITEBYTECODE), it is stored in the user's cache (`$XDG_CACHE_HOME/crossfed`, else
`~/.cache/crossfed`); where that is not this user's alone, either, each process compiles its own. The environment
variable CROSSFED_NATIVE=0 turns it off. Elementwise results are bitwise identical either way; sums of products may
differ in their last bits.

Every function takes contiguous arrays of the lengths it names and checks nothing: the callers do.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from facility.exchange.files.durable import as_umask_allows
from facility.exchange.files.user_cache import ours_alone, user_cache

SOURCE = Path(__file__).with_name("native.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_COMPILE_SECONDS = 60
RUN = 512
"""Values that the C code works on at once: `scratch` of `steps` holds this many for each update, and SPARE."""
SPARE = 16
KINDS = {"BF16": 0, "F16": 1, "F32": 2}
"""Stored dtypes that it reads, with its number for each."""


class BlockLayout(NamedTuple):
    """How differences to a base are stored that `steps` reads as they are: items, and scales for blocks of values."""

    number: int
    """That the compiled code has for it."""
    block: int
    """Values of one scale."""
    scale_bytes: int
    values: int
    """Values that one item holds."""
    item_bytes: int = 1


BLOCKS = {
    "INT8": BlockLayout(number=3, block=256, scale_bytes=4, values=1),
    "INT4": BlockLayout(number=4, block=64, scale_bytes=2, values=2),
    "PLACED": BlockLayout(number=6, block=4096, scale_bytes=4, values=4096, item_bytes=104),
}
"""By the name that a codec declares (`delta_codecs.Blocks`)."""
MARKED = {"SPARSE": BlockLayout(number=5, block=1 << 16, scale_bytes=24, values=8)}
"""Differences of which a bit for each value says whether it is kept: the `scale` of a part is what `struct marked` of
native.c holds (addresses of its levels and codes, and room for a number)."""
NUMBERS = KINDS | {kind: layout.number for kind, layout in (BLOCKS | MARKED).items()}
"""Of everything that `steps` reads."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled code, or None where it is turned off or cannot be made."""
    if os.environ.get("CROSSFED_NATIVE") == "0" or sys.byteorder != "little":
        return None
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if compiler is None or not SOURCE.exists():
        return None
    folder, name = SOURCE.parent / "__pycache__", f"native.{_digest(compiler)}.so"
    try:
        if (folder / name).exists():
            return _load(folder / name)
        if not sys.dont_write_bytecode and _made(folder):
            return _load(_compiled(compiler, folder, name))
        if (cache := user_cache()) is not None:
            stored = cache / name
            return _load(stored if ours_alone(stored) else _compiled(compiler, cache, name))
        with tempfile.TemporaryDirectory(prefix="crossfed-native-") as own:
            return _load(_compiled(compiler, Path(own), name))
    except (OSError, subprocess.SubprocessError):
        return None


def _made(folder: Path) -> bool:
    """Whether files can be written there."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _digest(compiler: str) -> str:
    """Digest of all that the machine code depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    processor = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    parts = (
        SOURCE.read_text(encoding="utf-8"),
        " ".join(FLAGS),
        os.path.realpath(compiler),
        platform.machine(),
        processor,
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _compiled(compiler: str, folder: Path, name: str) -> Path:
    descriptor, temporary = tempfile.mkstemp(dir=folder, suffix=".so")
    os.close(descriptor)
    try:
        subprocess.run(
            [compiler, *FLAGS, str(SOURCE), "-o", temporary, "-lm"],
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_COMPILE_SECONDS,
        )
        os.chmod(temporary, as_umask_allows(0o755))
        os.replace(temporary, folder / name)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return folder / name


def _load(path: Path) -> ctypes.CDLL:
    """The library, with result and arguments of each function as `native.c` declares them."""
    found = ctypes.CDLL(str(path))
    number, size, real, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
    double = ctypes.c_double
    quantised = (size, pointer, number, pointer, number, real, double, double, double, size, pointer, size)
    masked = (*quantised, pointer, pointer, pointer)
    for name, result, arguments in (
        ("read", size, (size, pointer, pointer, pointer, pointer)),
        ("widen", None, (size, pointer, number, pointer)),
        ("narrow", number, (size, pointer, pointer)),
        ("narrow_half", number, (size, pointer, pointer)),
        ("products", None, (size, size, pointer, size, pointer, size)),
        ("add_blocks", None, (size, size, pointer, pointer)),
        ("steps", None, (size, size, pointer, number, *[pointer] * 5, *[size, pointer] * 2, pointer, number, pointer)),
        ("nesterov", None, (size, real, real, pointer, pointer, pointer, pointer, pointer)),
        ("fixed16", None, (size, double, double, double, pointer, pointer, pointer)),
        ("fixed32", None, (size, double, double, double, pointer, pointer, pointer)),
        ("masked16", double, masked),
        ("masked32", double, masked),
        ("difference", double, (size, pointer, number, pointer, number, pointer)),
        ("int8_encode", None, (size, size, real, real, pointer, pointer, pointer)),
        ("int8_decode", None, (size, size, pointer, pointer, pointer)),
        ("int4_encode", None, (size, size, real, real, pointer, pointer, pointer)),
        ("int4_decode", None, (size, size, real, pointer, pointer, pointer)),
        ("sparse_encode", size, (size, real, pointer, pointer, pointer, pointer)),
        ("sparse_decode", None, (size, pointer, pointer, pointer, pointer)),
        ("placed_check", size, (size, pointer)),
        ("placed_decode", None, (size, pointer, pointer, pointer)),
        ("sparse_counts", size, (size, size, pointer, pointer)),
    ):
        function = getattr(found, f"crossfed_{name}")
        function.restype, function.argtypes = result, arguments
    return found


def address(array: Any) -> int:
    """Address of an array's first element in memory."""
    return array.__array_interface__["data"][0]


def steps(
    found: ctypes.CDLL,
    sources: Sequence[int],
    kinds: Sequence[int],
    widened: Any,
    rows: Any | None,
    gram: Any | None,
    weights: Any | None,
    total: Any,
    add: bool,
    scratch: Any,
    scales: Sequence[int] | None = None,
) -> None:
    """`sources`: addresses of the base and the updates as stored, `kinds` theirs; `scales`: addresses of theirs, for
    those of `BLOCKS`, which begin with a block; of those of `MARKED`, which are at most a part, its record.

    Fills `widened`, and what is not None of `rows` (updates, n), `total` (with `weights`, float32) and `gram`
    (symmetric, added to). `add`: the total is added to `widened`.

    `gram`: (updates, updates), or one for every RUN values: (runs, updates, updates).
    """
    count = len(sources) - 1
    found.crossfed_steps(
        len(widened),
        count,
        sources[0],
        kinds[0],
        (ctypes.c_void_p * count)(*sources[1:]),
        (ctypes.c_void_p * count)(*(scales[1:] if scales is not None else ())),
        (ctypes.c_int * count)(*kinds[1:]),
        address(widened),
        None if rows is None else address(rows),
        0 if rows is None else rows.strides[0] // 4,
        None if gram is None else address(gram),
        0 if gram is None or gram.ndim == 2 else count * count,
        None if weights is None else address(weights),
        address(total),
        add,
        address(scratch),
    )


def nesterov(rate: float, momentum: float, master: Any, step: Any, velocity: Any) -> tuple[Any, Any] | None:
    """Next master and velocity; None where these are not contiguous float32 arrays or there is no compiled code."""
    arrays = (master, step, velocity)
    if not all(
        isinstance(a, np.ndarray) and a.dtype == np.float32 and a.ndim == 1 and a.flags.c_contiguous for a in arrays
    ):
        return None
    if (found := library()) is None:
        return None
    new = np.empty_like(master), np.empty_like(master)
    found.crossfed_nesterov(len(master), rate, momentum, *map(address, (*arrays, *new)))
    return new
