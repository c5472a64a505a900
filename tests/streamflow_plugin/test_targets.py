"""Where a transfer may write: below one directory, under a plain name, over nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.streamflow_plugin.lanes import TransferFailed
from coordinator.streamflow_plugin.targets import check_target


def test_a_new_name_below_the_directory_is_taken(tmp_path: Path):
    (tmp_path / "work" / "job").mkdir(parents=True)
    check_target(tmp_path / "work" / "job" / "update", tmp_path / "work")
    (tmp_path / "link").symlink_to(tmp_path / "work")  # the directory itself may be named by a link
    check_target(tmp_path / "link" / "job" / "update", tmp_path / "link")
    check_target(tmp_path / "work" / "job" / "update", tmp_path / "link")


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../outside",
        "job/../../outside",
        "/etc/passwd",
        "job/up\ndate",
        "job/\x1b[2J",
        "job/\udcff",
        "job/cafe\u0301",
        "job/\u202etxt",
        "job/" + "n" * 256,
        "",
        "taken",
        "dangling",
        "through/update",
    ],
)
def test_any_other_target_is_refused(tmp_path: Path, name: str):
    work = tmp_path / "work"
    (work / "job").mkdir(parents=True)
    (work / "taken").touch()
    (work / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "victim").mkdir()
    (work / "through").symlink_to(tmp_path / "victim")
    target = Path(f"{work}/{name}") if not name.startswith("/") else Path(name)
    with pytest.raises(TransferFailed):
        check_target(target, work)
