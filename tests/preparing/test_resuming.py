"""Law: a run that was killed goes on where it was, and ends with the same files as one that was not."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from facility.dataset import DatasetError
from facility.preparing import reading, resuming, writing
from facility.preparing.build import Request, prepare_dataset
from facility.preparing.overlap import ContentDigests
from facility.preparing.sources import Document, Fields
from tests.preparing.corpora import sentences, write_json_lines
from tests.preparing.test_prepare import tree


def chat(text: str) -> dict[str, Any]:
    return {"prompt": text, "completion": f"si, {text}"}


TASKS: dict[str, dict[str, Any]] = {
    "joined": {},
    "separate": {"documents": "separate"},
    "chat": {"task": "chat", "fields": Fields(chat=True), "chat_template": "none"},
}


def request_of(place: Path, tokenizer: Path, kind: str) -> Request:
    place.mkdir(exist_ok=True)
    record = chat if kind == "chat" else lambda text: {"text": text}
    source = write_json_lines(place / "text.jsonl", [record(f"{i} {s}") for i, s in enumerate(sentences(200))])
    return Request(inputs=[str(source)], tokenizer=tokenizer, out=place / "out", block_tokens=64, **TASKS[kind])


ENCODE_ALL = writing.encode_all


class Killed(BaseException):
    """Stands for SIGKILL: no `except Exception` sees it."""


def killed_after(batches: int, counted: list[int]) -> Any:
    def encode_all(*arguments: Any, **settings: Any) -> Iterator[Any]:
        for number, one in enumerate(ENCODE_ALL(*arguments, **settings)):
            if number == batches:
                raise Killed
            counted.append(number)
            yield one

    return encode_all


@pytest.mark.parametrize("kind", list(TASKS))
def test_it_goes_on_where_it_was_killed(tmp_path: Path, tokenizer: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "BATCH_DOCUMENTS", 10)
    monkeypatch.setattr(resuming, "SAVE_SECONDS", 0.0)
    batches_of_whole = list[int]()
    monkeypatch.setattr(writing, "encode_all", killed_after(1000, batches_of_whole))
    whole = prepare_dataset(request_of(tmp_path / "whole", tokenizer, kind))
    request, counted = request_of(tmp_path / "killed", tokenizer, kind), list[int]()
    for batches in (7, 5, 1000):
        monkeypatch.setattr(writing, "encode_all", killed_after(batches, counted))
        if batches < 1000:
            with pytest.raises(Killed):
                prepare_dataset(request)
            assert not request.out.exists()
        else:
            prepared = prepare_dataset(request)
    assert len(counted) == len(batches_of_whole) > 12, "each batch was encoded once"
    assert prepared.dataset.manifest == whole.dataset.manifest
    assert tree(request.out) == tree(tmp_path / "whole" / "out")
    assert [one.name for one in request.out.parent.iterdir() if one.name.startswith(".")] == []


def test_other_sources_or_settings_begin_anew(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "BATCH_DOCUMENTS", 10)
    monkeypatch.setattr(resuming, "SAVE_SECONDS", 0.0)
    request, counted = request_of(tmp_path, tokenizer, "joined"), list[int]()
    monkeypatch.setattr(writing, "encode_all", killed_after(7, counted))
    with pytest.raises(Killed):
        prepare_dataset(request)
    monkeypatch.setattr(writing, "encode_all", killed_after(1000, counted))
    prepare_dataset(dataclasses.replace(request, block_tokens=32))
    assert len(counted) == 7 + 20


def test_an_error_leaves_nothing_and_a_second_process_is_refused(tmp_path: Path, tokenizer: Path):
    request = request_of(tmp_path, tokenizer, "joined")
    with resuming.part_of(request.out, {}, known=True), pytest.raises(DatasetError, match="written by another process"):
        prepare_dataset(request)
    with open(request.inputs[0], "a") as file:
        file.write("{no JSON\n")
    with pytest.raises(DatasetError, match="not valid JSON"):
        prepare_dataset(request)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["text.jsonl"]


@pytest.mark.parametrize("near_duplicates", [0.0, 0.8])
def test_no_file_is_open_in_the_folder_that_is_removed(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, near_duplicates: float
):
    """On NFS the folder stays where one is: a file that is removed while it is open gets another name in it."""
    request = dataclasses.replace(request_of(tmp_path, tokenizer, "joined"), near_duplicates=near_duplicates)
    monkeypatch.setattr(reading, "LARGE_BYTES", 1)
    remove, looked = shutil.rmtree, list[Path]()

    def look(path: Path, **options: Any) -> None:
        held = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        assert [one for one in held if one.startswith(f"{path}/")] == []
        looked.append(path)
        remove(path, **options)

    monkeypatch.setattr(resuming.shutil, "rmtree", look)
    prepare_dataset(request)
    assert looked == [tmp_path / ".out.part"]


def test_digests_on_disk_count_what_digests_in_memory_would(monkeypatch: pytest.MonkeyPatch):
    from facility.preparing import overlap

    monkeypatch.setattr(overlap, "PIECE_BYTES", 24)
    digests = ContentDigests()
    for split, texts in (("train", range(0, 50)), ("validation", range(40, 60)), ("train", range(50, 55))):
        digests.add(split, [Document(text=f" text {number}\n", done=0.0) for number in texts])
    assert digests.overlapping() == 15
