"""Copies of directories hold what `shutil.copytree` copies, and say of a full disk that it is one."""

from __future__ import annotations

import errno
import filecmp
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.archive.rounds import Archive
from facility.exchange.checkpoints.companions import MOMENTS, copy_companions
from facility.exchange.errors import exit_on_error
from facility.exchange.files.links import copy_tree


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "inner" / "_data").mkdir(parents=True)
    (root / "setup.sh").write_text("#!/bin/sh\n")
    (root / "setup.sh").chmod(0o755)
    (root / "inner" / "weights").write_bytes(bytes(1 << 20))
    (root / "inner" / "_data" / "left").write_text("out")
    (root / "link").symlink_to("inner/weights")
    (root / "inner" / "folder").symlink_to(root / "inner" / "_data")
    return root


@contextmanager
def small_files() -> Iterator[None]:
    """No file may grow beyond 64 KiB in here, which a file system refuses as it refuses what does not fit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def listing(root: Path) -> dict[str, tuple[int, bool]]:
    return {
        str(path.relative_to(root)): (path.lstat().st_mode, path.is_symlink())
        for folder, names, files in os.walk(root)
        for path in (Path(folder) / name for name in (*names, *files))
    }


@pytest.mark.parametrize("symlinks", [False, True])
@pytest.mark.parametrize("leave", [(), ("_data", "link")])
def test_a_copy_is_that_of_the_standard_library(tree: Path, tmp_path: Path, leave: tuple[str, ...], symlinks: bool):
    copy_tree(tree, tmp_path / "new" / "ours", leave=leave, symlinks=symlinks)
    shutil.copytree(tree, tmp_path / "theirs", ignore=shutil.ignore_patterns(*leave), symlinks=symlinks)
    assert listing(tmp_path / "new" / "ours") == listing(tmp_path / "theirs")
    files = [name for name in listing(tmp_path / "theirs") if (tmp_path / "theirs" / name).is_file()]
    same, different, failed = filecmp.cmpfiles(tmp_path / "new" / "ours", tmp_path / "theirs", files, shallow=False)
    assert sorted(same) == sorted(files) and not different and not failed


def test_what_a_file_system_refuses_is_named_with_its_file(tree: Path, tmp_path: Path):
    with small_files(), pytest.raises(OSError) as refused:
        copy_tree(tree, tmp_path / "out")
    assert refused.value.errno == errno.EFBIG
    assert Path(refused.value.filename2) == tmp_path / "out" / "inner" / "weights"


@pytest.mark.parametrize("place", ["archive", "companions"])
def test_a_model_that_does_not_fit_is_told_with_the_place_and_what_to_do(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
):
    model, following = tmp_path / "model", tmp_path / "next"
    (model / MOMENTS[0]).mkdir(parents=True)
    (model / MOMENTS[0] / "model.safetensors").write_bytes(bytes(1 << 20))
    following.mkdir()

    def main() -> int:
        if place == "archive":
            Archive(tmp_path / "archive").begin(model, "made")
        else:
            copy_companions(model, following, leave=())
        return 0

    with small_files():
        assert exit_on_error(main) == 2
    said = capsys.readouterr().err
    assert "may not grow so large: raise the limit on file sizes" in said and "model.safetensors" in said
