"""Laws: a hub that is silent is asked once, its cache is read all the same, and a name that neither has is an error."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import constants

from coordinator.model import convert_model
from facility.dataset import DatasetError
from facility.exchange.errors import TransientError
from facility.exchange.hub import offline_if_silent, why_hub_is_silent
from facility.preparing.sources import find_sources
from tests.pico import save_pico

DIGEST = "0" * 40


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[int]]:
    """A hub that closes each connection, and an empty cache; a number for each connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "data cache")
        connections: list[int] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # closed
                    return
                connections.append(len(connections))
                connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield connections
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def test_a_dataset_that_a_silent_hub_might_have_is_asked_for_once(asked: list[int]):
    with pytest.raises(DatasetError, match=r"nobody/nothing.*127\.0\.0\.1.* does not answer .*no file or folder"):
        find_sources(["nobody/nothing"], split="train")
    assert len(asked) == 1 and not constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE


def test_a_model_that_a_silent_hub_might_have_is_asked_for_once_and_the_cache_is_read(tmp_path: Path, asked: list[int]):
    with pytest.raises(TransientError, match=r"nobody/nothing.*127\.0\.0\.1.* does not answer"):
        convert_model("nobody/nothing", tmp_path / "out", dtype="float32", revision="main")
    assert len(asked) == 1 and not (tmp_path / "out").exists()
    kept = tmp_path / "cache/models--nobody--nothing"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs/main").write_text(DIGEST)
    shutil.copytree(save_pico(tmp_path / "pico"), kept / "snapshots" / DIGEST)
    assert "loaded and evaluated" in convert_model("nobody/nothing", tmp_path / "out", dtype="float32", revision="main")
    assert len(asked) == 2


def test_a_folder_that_may_not_be_looked_into_is_no_name_of_the_hub(
    asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """From Python 3.14 on `Path.exists` says of it that it is absent, and what anybody publishes by its name came."""
    monkeypatch.chdir(tmp_path)
    before = os.stat

    def closed(path: Any, *args: Any, **rest: Any) -> os.stat_result:
        if os.fspath(path).startswith("private") if isinstance(path, str | Path) else False:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return before(path, *args, **rest)

    monkeypatch.setattr(os, "stat", closed)
    for name, answer in (("exists", os.path.exists), ("is_file", os.path.isfile), ("is_dir", os.path.isdir)):
        monkeypatch.setattr(Path, name, answer)
    with pytest.raises(PermissionError):
        convert_model("private/model", tmp_path / "out", dtype="float32", revision="main")
    with pytest.raises(PermissionError):
        find_sources(["private/texts"], split="train")
    assert not asked


def test_who_is_offline_asks_nobody(asked: list[int], monkeypatch: pytest.MonkeyPatch):
    for module in (constants, datasets.config):
        with monkeypatch.context() as offline:
            offline.setattr(module, "HF_HUB_OFFLINE", True)
            assert why_hub_is_silent() == ""
            with offline_if_silent() as reason:
                assert reason == ""
    assert not asked and "does not answer" in why_hub_is_silent()


def test_a_login_in_the_address_of_the_hub_is_not_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://alice:s3cret@127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    assert "127.0.0.1:9 does not answer" in why_hub_is_silent() and "s3cret" not in why_hub_is_silent()
