"""How long each facility needed is noted by a line for each, and read again whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.rounds.late import FOLDER, SINCE, TIMES, add_time, forget_all, read_times, write_times


def test_what_is_noted_one_by_one_is_read_as_what_is_written_at_once(tmp_path: Path):
    write_times(tmp_path, {0: {"a": 1.5, "b": 2.0}})
    add_time(tmp_path, 0, "b", 2.5)
    add_time(tmp_path, 1, "a", 1.25)
    times = {0: {"a": 1.5, "b": 2.5}, 1: {"a": 1.25}}
    assert read_times(tmp_path) == times
    write_times(tmp_path, times)
    assert read_times(tmp_path) == times and not (tmp_path / FOLDER / SINCE).exists()


@pytest.mark.parametrize("facilities", [1, 8, 512])
def test_one_more_costs_one_line_however_many_there_are(facilities: int, tmp_path: Path):
    write_times(tmp_path, {0: {f"f{number:03}": 1.0 for number in range(facilities)}})
    before = (tmp_path / FOLDER / TIMES).stat()
    sizes = []
    for number in range(4):
        add_time(tmp_path, 1, f"f{number:03}", 1.0)
        sizes.append((tmp_path / FOLDER / SINCE).stat().st_size)
    assert [later - earlier for earlier, later in zip(sizes, sizes[1:], strict=False)] == [sizes[0]] * 3
    after = (tmp_path / FOLDER / TIMES).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns) and sizes[0] < 100


@pytest.mark.parametrize("torn", [b'{"round": 1, "fac', b"\xff\xfe\n", b"[]\n", b'{"round": "x"}\n'])
def test_a_line_that_cannot_be_read_takes_no_other_with_it(torn: bytes, tmp_path: Path):
    add_time(tmp_path, 0, "a", 1.0)
    with open(tmp_path / FOLDER / SINCE, "ab") as file:
        file.write(torn)
    assert read_times(tmp_path) == {0: {"a": 1.0}}


def test_a_new_federation_in_the_directory_knows_of_none(tmp_path: Path):
    write_times(tmp_path, {0: {"a": 1.0}})
    add_time(tmp_path, 1, "a", 1.0)
    forget_all(tmp_path)
    assert read_times(tmp_path) == {}
