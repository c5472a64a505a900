"""Tables of any size are read in pieces, and whole or not at all: no more than pieces of a file is held at once."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from facility.dataset import DatasetError
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


TEXTS = ["a" * 1111, "b" * 2222, "c" * 3333]
STREAM, FEATHER = pyarrow.ipc.new_stream, pyarrow.ipc.new_file


def arrow_file(path: Path, new: Any) -> bytes:
    """Of a batch for each text."""
    table = pyarrow.table({"text": TEXTS})
    with pyarrow.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    return path.read_bytes()


def texts_of(place: Path) -> list[str]:
    return [one.text for one in read_documents(*find_sources([str(place)], split="train"), Fields())]


def test_an_arrow_stream_is_read_to_its_end_or_not_at_all(tmp_path: Path):
    """One that was cut between two batches, or begun twice, lost all documents from there on in silence."""
    path = tmp_path / "d.arrow"
    whole = arrow_file(path, STREAM)
    assert texts_of(path) == TEXTS
    begin = b"\xff\xff\xff\xff"  # of each message, the end itself included
    second, third = (whole.rindex(begin, 0, whole.index(text.encode())) for text in TEXTS[1:])
    for end in (second, third, len(whole) - 8):
        path.write_bytes(whole[:end])
        with pytest.raises(DatasetError, match="the stream has no end; it was cut off"):
            texts_of(path)
    for more in (whole, b"more text"):
        path.write_bytes(whole + more)
        with pytest.raises(DatasetError, match=f"{len(more)} bytes follow the stream's end"):
            texts_of(path)


def test_a_saved_data_set_whose_stream_was_cut_between_batches_is_refused(tmp_path: Path):
    """`datasets` reads the batches before the cut, and no other, in silence."""
    texts = [f"text {number}" for number in range(2500)]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(saved := tmp_path / "saved"), num_shards=2)
    assert texts_of(saved) == texts
    last = saved / "data-00001-of-00002.arrow"
    whole = last.read_bytes()
    for cut in (whole[:-8], whole[: whole.rindex(b"\xff\xff\xff\xff", 0, -8)]):
        last.write_bytes(cut)
        assert len(datasets.load_from_disk(str(saved))) <= len(texts)
        with pytest.raises(DatasetError, match=r"saved cannot be read: .*data-00001-of-00002\.arrow: the stream"):
            texts_of(saved)


@pytest.mark.parametrize("kind", ["d.arrow", "d.parquet"])
def test_a_column_that_is_there_twice_is_refused(tmp_path: Path, kind: str):
    """Of Parquet the last one was read in silence, of Arrow files none, with a traceback."""
    table = pyarrow.Table.from_arrays([pyarrow.array([one]) for one in TEXTS], names=["text", "text", "note"])
    if kind == "d.parquet":
        pyarrow.parquet.write_table(table, tmp_path / kind)
    else:
        with pyarrow.OSFile(str(tmp_path / kind), "wb") as file, STREAM(file, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(DatasetError, match="'text' names several columns; rename all but one"):
        texts_of(tmp_path / kind)
    (only,) = read_documents(*find_sources([str(tmp_path / kind)], split="train"), Fields(text="note"))
    assert only.text == TEXTS[2]


@pytest.mark.parametrize("kind", [STREAM, FEATHER, "saved"])
def test_no_offset_of_a_damaged_table_is_followed_out_of_it(tmp_path: Path, kind: Any):
    """Reading crashed, or took for text what lay in memory beyond it."""
    place = path = tmp_path / "d.arrow"
    if kind == "saved":
        table = {"text": TEXTS, "note": ["another column"] * 3}
        datasets.Dataset.from_dict(table).save_to_disk(str(place := tmp_path / "saved"))
        (path,) = place.glob("*.arrow")
        whole, offsets, damaged = path.read_bytes(), (1111, 3333, 6666), (1111, 3333, 6720)
    else:
        whole, offsets, damaged = arrow_file(path, kind), (0, 2222), (0, -1)
    assert texts_of(place) == TEXTS
    there = struct.pack(f"<{len(offsets)}i", *offsets)
    assert whole.count(there) == 1
    path.write_bytes(whole.replace(there, struct.pack(f"<{len(damaged)}i", *damaged)))
    with pytest.raises(DatasetError, match="cannot be read|is not a readable Arrow file"):
        texts_of(place)


def test_a_page_of_a_parquet_file_that_was_altered_is_refused_by_its_checksum(tmp_path: Path):
    path = tmp_path / "g.parquet"
    table = pyarrow.table({"text": TEXTS})
    pyarrow.parquet.write_table(table, path, write_page_checksum=True, compression="none", use_dictionary=False)
    whole = path.read_bytes()
    assert texts_of(path) == TEXTS
    path.write_bytes(whole.replace(b"a" * 1000, b"x" * 1000))
    with pytest.raises(DatasetError, match=r"g\.parquet .*(CRC|checksum)"):
        texts_of(path)
