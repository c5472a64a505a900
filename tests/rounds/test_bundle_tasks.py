"""`crossfed bundle --eval`: the data of tasks, seen to suffice without a network, reach the facility's cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator import evaluation_cache
from coordinator.bundle import download, make_bundle
from coordinator.bundle_contents import SUMS
from coordinator.evaluation_cache import OFFLINE, fill_cache
from facility.exchange.errors import InputError, TransientError
from tests.rounds.test_evaluation import write_task


def wheels_appear(words: list[str], _: str) -> int:
    """`pip download`, which leaves one wheel."""
    place = Path(words[words.index("--dest") + 1])
    (place / "torch-2.13.0-py3-none-any.whl").write_bytes(b"wheel")
    return 0


@pytest.mark.slow
def test_the_data_are_in_the_bundle_under_its_digests(tmp_path: Path):
    pytest.importorskip("lm_eval")
    tasks = write_task(tmp_path / "tasks")
    options = {"python": "3.11", "platform": "manylinux_2_28_x86_64", "torch": "cpu"}
    told = make_bundle(tmp_path / "out", **options, tasks=["count_up"], include=tasks, run=wheels_appear)  # type: ignore[arg-type]
    assert told["tasks"] == ["count_up"]
    arrow = next((tmp_path / "out" / "evaluation").rglob("*.arrow"))
    assert str(arrow.relative_to(tmp_path / "out")) in (tmp_path / "out" / SUMS).read_text()
    assert not list((tmp_path / "out" / "evaluation").rglob("*.lock"))


def test_lm_eval_is_among_the_wheels_only_where_tasks_are():
    options = {"python": "3.11", "platform": "manylinux_2_28_x86_64"}
    plain, with_tasks = download(Path("w"), **options), download(Path("w"), **options, extras=("eval",))
    assert not any("lm-eval" in word for word in plain) and any("lm-eval" in word for word in with_tasks)


@pytest.mark.parametrize("tasks", [["no_such_task"], []])
def test_tasks_that_cannot_be_had_are_found_before_a_package_comes(tmp_path: Path, monkeypatch, tasks: list[str]):
    def unknown(*_, **__):
        raise TransientError("no_such_task cannot be loaded")

    monkeypatch.setattr("coordinator.bundle.fill_cache", unknown)
    options = {"python": "3.11", "platform": "manylinux_2_28_x86_64", "torch": "cpu", "run": pytest.fail}
    with pytest.raises(TransientError if tasks else InputError, match="no_such_task" if tasks else "that --eval names"):
        make_bundle(tmp_path / "out", **options, tasks=tasks, include=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="--eval-include is .*nowhere', expected a folder"):
        make_bundle(tmp_path / "out", **options, tasks=tasks, include=tmp_path / "nowhere")  # type: ignore[arg-type]


@pytest.mark.parametrize("fails", [0, 1])
def test_a_cache_that_does_not_suffice_is_an_error_here_and_not_there(tmp_path: Path, fails: int):
    asked: list[dict[str, str]] = []

    def run(command, environment):
        asked.append(dict(environment))
        code = int(len(asked) == fails + 1)
        return subprocess.CompletedProcess(command, code, stdout="a line\nCouldn't reach 'allenai/ai2_arc' on the Hub")

    with pytest.raises(TransientError, match=["with the network", "without a network"][fails] + ".*ai2_arc"):
        fill_cache(tmp_path, ["arc_easy"], run=run)
    assert [one["HF_HOME"] for one in asked] == [str(tmp_path / "evaluation")] * (fails + 1)
    offline = [all(one.get(name) == value for name, value in OFFLINE.items()) for one in asked]
    assert offline == [False, True][: fails + 1]


@pytest.mark.parametrize(("code", "error"), [(2, InputError), (75, TransientError)])
def test_an_error_that_is_known_is_told_as_it_is(tmp_path: Path, code: int, error: type[Exception]):
    """A task that lm-eval does not know was to be tried again, behind the last lines of what was printed."""

    def run(command, environment):
        return subprocess.CompletedProcess(command, code, stdout="a warning\nerror: lm-eval knows no task arc_eazy")

    with pytest.raises(error, match="^lm-eval knows no task arc_eazy$"):
        fill_cache(tmp_path, ["arc_eazy"], run=run)


def test_a_hub_that_does_not_answer_is_told_before_anything_is_tried(tmp_path: Path):
    """The libraries asked again and again, for minutes, and ended in a traceback."""
    command = [sys.executable, "-X", "importtime", "-m", "coordinator.evaluation_cache", "arc_easy"]
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time")]
    assert done.returncode == 75 and len(lines) == 1
    assert lines[0].startswith("error: http://127.0.0.1:9 does not answer") and "HTTPS_PROXY" in lines[0]
    assert "lm_eval" not in done.stderr.replace(lines[0], "")


def test_data_that_are_here_are_read_and_what_is_missing_is_told_with_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("facility.exchange.hub.why_hub_is_silent", lambda: "the hub does not answer")
    evaluation_cache.load(lambda: None)
    with pytest.raises(
        TransientError, match=r"^the hub does not answer, and not all data are here already \(no arc\): give"
    ):
        evaluation_cache.load(lambda: (_ for _ in ()).throw(ConnectionError("no arc")).__next__())
    monkeypatch.setattr("facility.exchange.hub.why_hub_is_silent", lambda: "")
    with pytest.raises(ConnectionError):
        evaluation_cache.load(lambda: (_ for _ in ()).throw(ConnectionError("no arc")).__next__())
