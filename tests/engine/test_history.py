"""What a running federation's display knows of its rounds: a round file is read once, the words follow the rounds."""

from __future__ import annotations

import json
from pathlib import Path

from coordinator.archive.rounds import Archive, RoundFile
from coordinator.engine.history import History
from facility.exchange.task_words import words_of
from tests.report.made import made_archive


def test_each_round_file_is_read_once_and_new_rounds_change_the_words(tmp_path: Path, monkeypatch):
    archive = made_archive(tmp_path / "archive", facilities=3, rounds=3)
    for number, task in enumerate(["preference", "image-classification", "image-classification"]):
        file = archive.round_directory(number) / "round.json"
        entry = json.loads(file.read_text())
        entry["facilities"] = [row | {"task": task, "status": "ok"} for row in entry["facilities"]]
        file.write_text(json.dumps(entry))
    read: list[int] = []
    plain = Archive.read_round

    def counted(self: Archive, number: int) -> RoundFile:
        read.append(number)
        return plain(self, number)

    monkeypatch.setattr(Archive, "read_round", counted)
    later = {number: archive.round_directory(number).rename(tmp_path / f"later-{number}") for number in (1, 2)}
    history = History(archive)
    for _ in range(3):
        assert [entry.round for entry in history.rounds()] == [0]
        assert history.words() == words_of("preference")
    for number, hidden in later.items():
        hidden.rename(archive.round_directory(number))
    assert history.words() == words_of("image-classification")
    history.rounds().clear()  # the caller's own list
    assert [entry.round for entry in history.rounds()] == read == [0, 1, 2]


def test_the_words_of_a_new_archive_are_those_of_the_initial_model_once_it_is_there(tmp_path: Path):
    """The display asks from its first second on, before anything is in the archive; round 0 counts images, too."""
    archive = Archive(tmp_path / "archive")
    history = History(archive)
    assert history.words() == words_of("")
    model = archive.path / "initial" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"architectures": ["ViTForImageClassification"]}))
    assert history.words().live_unit == "images"
