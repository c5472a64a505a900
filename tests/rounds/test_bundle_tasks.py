"""`crossfed bundle --eval`: the data of tasks, seen to suffice without a network, reach the facility's cache."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from coordinator.bundle import bundle, download
from coordinator.bundle_contents import SUMS
from coordinator.evaluation_cache import OFFLINE, fill
from facility.exchange.errors import InputError, TryAgain
from tests.rounds.test_evaluation import write_task


def wheels_appear(words: list[str]) -> int:
    """`pip download`, which leaves one wheel."""
    place = Path(words[words.index("--dest") + 1])
    (place / "torch-2.13.0-py3-none-any.whl").write_bytes(b"wheel")
    return 0


@pytest.mark.slow
def test_the_data_are_in_the_bundle_under_its_digests(tmp_path: Path):
    pytest.importorskip("lm_eval")
    tasks = write_task(tmp_path / "tasks")
    options = {"python": "3.11", "platform": "manylinux_2_28_x86_64", "torch": "cpu"}
    told = bundle(tmp_path / "out", **options, tasks=["count_up"], include=tasks, run=wheels_appear)  # type: ignore[arg-type]
    assert told["tasks"] == ["count_up"]
    arrow = next((tmp_path / "out" / "evaluation").rglob("*.arrow"))
    assert str(arrow.relative_to(tmp_path / "out")) in (tmp_path / "out" / SUMS).read_text()
    assert not list((tmp_path / "out" / "evaluation").rglob("*.lock"))


def test_lm_eval_is_among_the_wheels_only_where_tasks_are():
    options = {"python": "3.11", "platform": "manylinux_2_28_x86_64", "index": ""}
    plain, with_tasks = download(Path("w"), **options), download(Path("w"), **options, extras=("eval",))
    assert not any("lm-eval" in word for word in plain) and any("lm-eval" in word for word in with_tasks)


@pytest.mark.parametrize("tasks", [["no_such_task"], []])
def test_tasks_that_cannot_be_had_are_found_before_a_package_comes(tmp_path: Path, monkeypatch, tasks: list[str]):
    def unknown(*_, **__):
        raise TryAgain("no_such_task cannot be loaded")

    monkeypatch.setattr("coordinator.bundle.fill", unknown)
    options = {"python": "3.11", "platform": "manylinux_2_28_x86_64", "torch": "cpu", "run": pytest.fail}
    with pytest.raises(TryAgain if tasks else InputError, match="no_such_task" if tasks else "that --eval names"):
        bundle(tmp_path / "out", **options, tasks=tasks, include=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="--eval-include is .*nowhere', expected a folder"):
        bundle(tmp_path / "out", **options, tasks=tasks, include=tmp_path / "nowhere")  # type: ignore[arg-type]


@pytest.mark.parametrize("fails", [0, 1])
def test_a_cache_that_does_not_suffice_is_an_error_here_and_not_there(tmp_path: Path, fails: int):
    asked: list[dict[str, str]] = []

    def run(command, environment):
        asked.append(dict(environment))
        code = int(len(asked) == fails + 1)
        return subprocess.CompletedProcess(command, code, stdout="a line\nCouldn't reach 'allenai/ai2_arc' on the Hub")

    with pytest.raises(TryAgain, match=["with the network", "without a network"][fails] + ".*ai2_arc"):
        fill(tmp_path, ["arc_easy"], run=run)
    assert [one["HF_HOME"] for one in asked] == [str(tmp_path / "evaluation")] * (fails + 1)
    offline = [all(one.get(name) == value for name, value in OFFLINE.items()) for one in asked]
    assert offline == [False, True][: fails + 1]
