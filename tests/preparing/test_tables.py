"""Tables of any size are read in pieces: neither a file, nor a row group, nor many long rows are held at once."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from facility.preparing.sources import Fields, find_sources, read_documents


@pytest.mark.parametrize("group", [500, 20_000])
def test_of_a_parquet_file_no_more_than_pieces_is_held(tmp_path: Path, group: int):
    """Left to itself, pyarrow reads the columns of all row groups before it hands out the first row."""
    path, rows, size = tmp_path / "d.parquet", 20_000, 1_000
    table = pyarrow.table({"text": [os.urandom(size // 2).hex() for _ in range(rows)]})
    pyarrow.parquet.write_table(table, path, row_group_size=group, write_batch_size=64)  # pages of 1 MB
    del table
    before, held = pyarrow.total_allocated_bytes(), []
    for document in read_documents(*find_sources([str(path)], split="train"), Fields()):
        assert len(document.text) == size
        held.append(pyarrow.total_allocated_bytes() - before)
    assert len(held) == rows
    assert max(held) < rows * size / 2, "bytes"


def test_long_rows_of_a_table_become_texts_a_few_at_a_time(tmp_path: Path):
    rows, size = 60, 1_000_000
    table = pyarrow.table({"text": [f"{number:02d}" * (size // 2) for number in range(rows)]})
    pyarrow.parquet.write_table(table, tmp_path / "e.parquet")
    with pyarrow.OSFile(str(tmp_path / "e.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    for kind in ("parquet", "arrow"):
        tracemalloc.start()
        (source,) = find_sources([str(tmp_path / f"e.{kind}")], split="train")
        found = [(document.text[:2], len(document.text)) for document in read_documents(source, Fields())]
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found == [(f"{number:02d}", size) for number in range(rows)]
        assert most < rows * size / 2, f"bytes of objects of Python, {kind}"


def test_long_rows_among_many_short_ones_are_as_few_at_a_time(tmp_path: Path):
    """Texts that are sorted by length, or repeated: how long a row is on average says nothing of those."""
    rows, size = 256, 100_000
    path = tmp_path / "f.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["short"] * 100_000 + ["x" * size] * rows}), path)
    before, held = pyarrow.total_allocated_bytes(), []
    for document in read_documents(*find_sources([str(path)], split="train"), Fields()):
        if len(document.text) == size:
            held.append(pyarrow.total_allocated_bytes() - before)
    assert len(held) == rows
    assert max(held) < rows * size / 2, "bytes"
