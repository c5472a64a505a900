"""Opening a prepared dataset: what is not as its manifest says is an error that names the file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from facility.dataset import DatasetError, open_dataset
from facility.preparing.build import Request, prepare_dataset
from facility.preparing.packing import RowWriter
from tests.preparing.corpora import save_tokenizer, sentences, write_json_lines


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    path = write_json_lines(tmp_path / "a.jsonl", [{"text": t} for t in sentences(60)])
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    return prepare_dataset(
        Request(inputs=[str(path)], tokenizer=tokenizer, out=tmp_path / "out", block_tokens=16)
    ).dataset.directory


def test_opening_maps_the_blocks_read_only(prepared: Path):
    dataset = open_dataset(prepared)
    dataset.verify()
    blocks = dataset.split("train")
    assert isinstance(blocks, numpy.memmap) and blocks.shape == (dataset.manifest.splits["train"].blocks, 16)
    with pytest.raises(ValueError, match="read-only"):
        blocks[0, 0] = 1
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(dataset.tokenizer_directory).decode(blocks[0][:4])
    with pytest.raises(DatasetError, match="no split 'test'; it has train, validation"):
        dataset.split("test")


def test_opening_needs_neither_torch_nor_transformers(prepared: Path):
    code = (
        f"import sys, facility.dataset as d; d.open_dataset({str(prepared)!r}).verify(); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'datasets')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def edit(directory: Path, **values) -> None:
    raw = json.loads((directory / "dataset.json").read_text())
    (directory / "dataset.json").write_text(json.dumps(raw | values))


def test_a_missing_or_foreign_directory(prepared: Path, tmp_path: Path):
    with pytest.raises(DatasetError, match="is not a directory"):
        open_dataset(tmp_path / "nowhere")
    with pytest.raises(DatasetError, match=r"holds no dataset\.json"):
        open_dataset(tmp_path)
    (prepared / "train.npy").unlink()
    with pytest.raises(DatasetError, match=r"train\.npy is missing"):
        open_dataset(prepared)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format": 2}, "format 2, this version reads up to 1"),
        ({"format": "1"}, "integer `format`"),
        ({"surprise": 1}, "surprise is a key that is unknown here"),
        ({"task": "telepathy"}, "task"),
        ({"block_tokens": 8}, r"says int32 of shape \(\d+, 8\)"),
        ({"splits": {}}, "has splits"),
        ({"splits": 3}, "`splits` is 3 .*expected an object and a list"),
        ({"sources": [{"name": "x"}]}, "lacks"),
    ],
)
def test_a_wrong_manifest(prepared: Path, values: dict, message: str):
    edit(prepared, **values)
    with pytest.raises(DatasetError, match=message):
        open_dataset(prepared)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_manifest_that_is_not_json(prepared: Path, content: bytes):
    (prepared / "dataset.json").write_bytes(content)
    with pytest.raises(DatasetError):
        open_dataset(prepared)


def test_a_truncated_file_is_noticed_when_it_is_opened(prepared: Path):
    file = prepared / "train.npy"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(DatasetError, match="not an array that can be mapped"):
        open_dataset(prepared)


def test_an_open_dataset_asks_for_no_path_again(prepared: Path):
    """Every micro-batch of every rank opened it three times: a shared file system had thousands of opens a step."""
    expected = {name: numpy.array(open_dataset(prepared).split(name)) for name in ("train", "validation")}
    dataset = open_dataset(prepared)
    prepared.rename(prepared.with_name("elsewhere"))
    assert all((dataset.split(name) == ids).all() for name, ids in expected.items())


def test_a_dataset_that_is_read_by_batches_takes_the_memory_of_one(prepared: Path):
    """A scheduler counts mapped pages as memory of the job, and a round touches all of its dataset."""
    rows = 1 << 20
    numpy.lib.format.open_memmap(prepared / "train.npy", "w+", numpy.int32, (rows, 16))[:] = 7  # 64 MiB
    card = json.loads((prepared / "dataset.json").read_text())
    card["splits"]["train"]["blocks"] = rows
    edit(prepared, splits=card["splits"])
    dataset = open_dataset(prepared)

    def mapped() -> int:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["RssFile"].split()[0]) >> 10

    before, first, part = mapped(), dataset.split("train")[:2], rows // 32
    assert all((dataset.split("train")[at : at + part] == 7).all() for at in range(0, rows, part))
    assert mapped() - before < 16
    assert (first == 7).all()


def test_an_altered_file_is_noticed_by_verify(prepared: Path):
    file = prepared / "validation.npy"
    content = bytearray(file.read_bytes())
    content[-4] ^= 1
    file.write_bytes(content)
    dataset = open_dataset(prepared)
    with pytest.raises(DatasetError, match=r"validation\.npy has sha256"):
        dataset.verify()


def test_pickled_arrays_are_refused(prepared: Path):
    numpy.save(prepared / "train.npy", numpy.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DatasetError, match="not an array that can be mapped"):
        open_dataset(prepared)


@pytest.mark.parametrize("rows", [0, 1, 9, 10, 99_999, 100_000])
def test_the_header_has_room_for_any_number_of_rows(tmp_path: Path, rows: int):
    writer = RowWriter(tmp_path / "a.npy", 3)
    expected = numpy.arange(rows * 3, dtype=numpy.int32).reshape(rows, 3)
    writer.append(expected[: rows // 2])
    writer.append(expected[rows // 2 :])
    writer.close()
    assert (numpy.load(tmp_path / "a.npy", allow_pickle=False) == expected).all()
    reference = tmp_path / "b.npy"
    numpy.save(reference, expected)
    assert (tmp_path / "a.npy").read_bytes() == reference.read_bytes()
