"""Rows of a Parquet or Arrow file, a few at a time: no more of a file than pieces is held, however large it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from facility.dataset import DatasetError

READ_BYTES = 1 << 20
"""Of a column, read at once from a Parquet file."""
MOST_ROWS = 64
MOST_BYTES = 8 << 20
"""Of rows that are Python objects at the same time, if all are alike: a longer row is one by itself."""


def once_each(columns: list[str], available: Sequence[str], place: str) -> list[str]:
    """The columns. Raises `DatasetError` where a table has two of a name: only the last one's values would be read."""
    if twice := [name for name in columns if available.count(name) > 1]:
        raise DatasetError(f"{place}: {twice[0]!r} names several columns; rename all but one")
    return columns


def open_parquet(path: Path) -> Any:
    """A `ParquetFile` whose columns are read in pieces: left to itself, pyarrow holds them whole, of all row groups.

    The checksums of its pages are verified, where it has some.
    """
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path, buffer_size=READ_BYTES, pre_buffer=False, page_checksum_verification=True)


def parquet_rows(file: Any, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a file that `open_parquet` opened, each with these columns."""
    groups = (file.metadata.row_group(number) for number in range(file.metadata.num_row_groups))
    chunks = (group.column(number) for group in groups for number in range(group.num_columns))
    size = sum(chunk.total_uncompressed_size for chunk in chunks if _is_of(chunk.path_in_schema, columns))
    for batch in file.iter_batches(batch_size=_rows_at_once(file.metadata.num_rows, size), columns=columns):
        yield from batch.to_pylist()


def batch_rows(batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of one batch of an Arrow file. Raises `ArrowInvalid` for a damaged one: its offsets are addresses, and
    pyarrow follows them past its end, into whatever else lies in memory."""
    batch.validate(full=True)
    step = _rows_at_once(batch.num_rows, batch.nbytes)
    for start in range(0, batch.num_rows, step):
        yield from batch.slice(start, step).to_pylist()


def _is_of(leaf: str, columns: Sequence[str]) -> bool:
    """Is this part of a nested column, or a whole plain one, among the columns?"""
    return any(leaf == column or leaf.startswith(f"{column}.") for column in columns)


def _rows_at_once(rows: int, size: int) -> int:
    """Rows of `MOST_BYTES` together, where all take `size` bytes."""
    return max(1, min(MOST_ROWS, rows * MOST_BYTES // max(size, 1)))
