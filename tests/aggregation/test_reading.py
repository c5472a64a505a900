"""A part of a tensor is read from all sources at once: the same elements, and the same errors, as one by one."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from coordinator.aggregation.reading import TensorReader
from coordinator.aggregation.streams import STORED, Files
from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.checkpoint import ITEM_BYTES, TensorEntry, open_checkpoint
from facility.exchange.errors import CheckpointError
from tests.aggregation import make

ELEMENTS = 10_000
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@pytest.fixture
def sources(tmp_path: Path) -> list[dict[str, TensorEntry]]:
    """Checkpoints of several dtypes; the third has no tensor `b`."""
    found = []
    for number, dtype in enumerate(DTYPES):
        tensors = make.random_tensors(number, {"a": (77,), "b": (ELEMENTS,)}, dtype)
        found.append(dict(open_checkpoint(make.model(tmp_path / str(number), tensors)).tensors))
    del found[2]["b"]
    return found


@pytest.fixture(params=["compiled", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("no C compiler here")


def reader(files: Files, sources: list[dict[str, TensorEntry]]) -> TensorReader:
    for source in sources:
        files.open(source.values())
    return TensorReader("b", sources, files, [np.empty(ELEMENTS * 8, np.uint8).data for _ in sources])


@pytest.mark.parametrize(("begin", "count"), [(0, ELEMENTS), (9_000, 1_000), (17, 1)])
def test_the_elements_are_those_in_the_files(way: None, sources: list[dict[str, TensorEntry]], begin: int, count: int):
    with Files() as files:
        reads = reader(files, sources)
        found = reads.read(begin, count)
        assert found[2] is None and reads.bytes_of(count) == (2 + 4) * count
        for array, source, place in zip(found[:2], sources, reads.places, strict=False):
            entry = source["b"]
            assert array is not None and native.address(array) == place
            offset = entry.start + begin * ITEM_BYTES[entry.dtype]
            assert np.array_equal(array, np.fromfile(entry.file, STORED[entry.dtype], count, offset=offset))


def test_a_file_that_ends_early_is_named(way: None, sources: list[dict[str, TensorEntry]]):
    entry = sources[1]["b"]
    with Files() as files:
        reads = reader(files, sources)
        os.truncate(entry.file, entry.start + 4 * (ELEMENTS - 1))
        reads.read(0, ELEMENTS - 1)
        with pytest.raises(CheckpointError, match=f"{entry.file} ends at byte {entry.start + 4 * (ELEMENTS - 1)}"):
            reads.read(0, ELEMENTS)
