"""A coordinator behind a gate may write files where a job runs; nothing of them is executed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from facility.exchange.errors import TransientError
from facility.exchange.messages.evaluation import EvaluationSettings
from facility.exchange.messages.manifest import sha256_of
from facility.gating import approval
from facility.gating.jobs import SCRATCH
from facility.gating.search_paths import SHELL, keep_absolute
from facility.launching.notes import PLACE as NOTES
from facility.rounds import evaluation
from facility.training.monitor.tracker import Tracker
from tests.conftest import ROOT
from tests.security import test_gate
from tests.security.test_gate import Gate, packed

site = test_gate.site
MARK = "import pathlib; pathlib.Path({place!r}).touch()\n"
PLANTS = (
    "facility/__init__.py",
    "json.py",
    "sitecustomize.py",
    "usercustomize.py",
    "lib/python{}.{}/site-packages/evil.pth".format(*sys.version_info[:2]),
    ".local/lib/python{}.{}/site-packages/evil.pth".format(*sys.version_info[:2]),
)


@pytest.mark.parametrize("guarded", [True, False])
def test_a_job_imports_nothing_that_a_coordinator_put_beside_it(site: Gate, guarded: bool):
    """Without the two variables the same files run: the attack is one."""
    request, taken = site.round(), site.folder / "taken"
    files = {name: MARK.format(place=str(taken)).encode() for name in PLANTS}
    for place in ("job", "tmp"):
        assert site.ask(f"crossfed-gate put-tree {site.workdir}/{place}", data=packed(**files))[0] == 0
    assert site.ask(request)[0] == 0
    script = site.calls[-1][1]
    assert script is not None
    if not guarded:
        script = script.replace("PYTHONSAFEPATH=1", "NO=1").replace("PYTHONNOUSERSITE=1", "NO=1")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "PYTHONPATH": str(ROOT), "CROSSFED_HOME": str(site.home)}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=200)
    assert taken.exists() != guarded, done.stdout
    if guarded:
        assert (site.workdir / "job" / "update" / "failure.json").is_file(), done.stdout


@pytest.mark.parametrize(
    ("name", "value", "planted"),
    [("LD_LIBRARY_PATH", "/opt/lib:", "libselinux.so.1"), ("PYTHONPATH", f":{ROOT}", "json.py")],
)
def test_no_search_path_of_a_site_leads_to_where_a_job_runs(site: Gate, name: str, value: str, planted: str):
    """`LD_LIBRARY_PATH=/opt/lib:`, as modules leave it, has the working directory in it: mkdir ran the library."""
    request, taken = site.round(), site.folder / "taken"
    content = MARK.format(place=str(taken)).encode() if planted.endswith(".py") else b"no library"
    assert site.ask(f"crossfed-gate put-tree {site.workdir}/job", data=packed(**{planted: content}))[0] == 0
    assert site.ask(request)[0] == 0
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment |= {"CROSSFED_HOME": str(site.home), name: value}
    (site.workdir / "in" / "model" / "manifest.json").unlink()  # it is told, and all programs ran
    script = (site.calls[-1][1] or "").replace("set -f;", "set -f; set -e;", 1)  # as a site's template may have it
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=200)
    assert (site.workdir / "job" / "update" / "failure.json").is_file(), done.stderr
    assert not taken.exists() and "file too short" not in done.stdout + done.stderr


def test_a_gate_and_what_it_starts_search_absolute_folders_alone(monkeypatch: pytest.MonkeyPatch):
    """sbatch runs in the job's directory."""
    monkeypatch.setenv("LD_LIBRARY_PATH", ":/opt/lib:lib::/usr/lib:")
    monkeypatch.setenv("PYTHONPATH", ".")
    keep_absolute()
    assert os.environ["LD_LIBRARY_PATH"] == "/opt/lib:/usr/lib" and os.environ["PYTHONPATH"] == ""
    told = ":/opt/a b:lib::/x*:"
    script = f'{SHELL}; echo "$CPATH,${{LIBRARY_PATH-none}}"'
    for shell in ("sh", "bash"):
        done = subprocess.run([shell, "-euc", script], env={"PATH": "/bin:.", "CPATH": told}, capture_output=True)
        assert done.stdout.decode() == "/opt/a b:/x*,none\n", done.stderr


def test_what_a_jobs_libraries_and_tasks_keep_is_where_no_request_leads(site: Gate):
    assert site.ask(site.round())[0] == 0
    script = site.calls[-1][1] or ""
    own = ("HOME=", "TMPDIR=", f"{NOTES}=")
    found = [word.partition("=")[2] for word in script.split() if word.startswith(own)]
    assert len(found) == len(own), "the notes hold the secret that admits a rank"
    (place,) = map(Path, set(found))
    assert place.parent == site.home / "gate" / SCRATCH and not place.is_relative_to(site.workdir)
    assert f"mkdir -m 700 -p {place} && " in script
    old, new = place.parent / "old", place.parent / "new"
    for one, age in ((old, 2 * 3600 + 86400 + 60), (new, 3600)):
        one.mkdir()
        os.utime(one, (time.time() - age,) * 2)
    assert site.ask(site.round())[0] == 0
    assert new.exists() and not old.exists(), "of a job whose time limit is long over"


def test_a_jobs_settings_are_those_that_were_approved_whatever_is_put_in_their_place(site: Gate):
    """A job reads them when it starts and its ranks once more, while requests can write all of the workdir."""
    request, settings = site.round(), site.workdir / "in" / "alpha.json"
    approved = settings.read_bytes()
    assert site.ask(request)[0] == 0
    words = shlex.split(site.calls[-1][1] or "")
    given = Path(words[words.index("--settings") + 1])
    assert site.ask(f"crossfed-gate put-file {settings} 600", data=b'{"other": 1}')[0] == 0
    assert given.read_bytes() == approved and not given.resolve().is_relative_to(site.workdir)
    assert words[words.index("--approved") + 2] == sha256_of(given)
    (given.parent / f"{'0' * 64}.json").touch()
    assert site.ask(site.round(learning_rate=0.5))[0] == 0
    assert len(list(given.parent.iterdir())) == 2, "those that no order named are forgotten"


def test_settings_that_are_exchanged_while_they_are_read_are_checked_as_they_are_used(
    site: Gate, monkeypatch: pytest.MonkeyPatch
):
    """Those of the order are there when digests are compared, others, which the policy allows, when they are read."""
    request, settings = site.round(tracker="wandb"), site.workdir / "in" / "alpha.json"
    signed, digest, verify = settings.read_bytes(), approval.sha256_of, approval.verify_order

    def leave(path: Path) -> str:
        if path.name == "manifest.json":
            settings.write_bytes(signed.replace(b"wandb", b""))
        return digest(path)

    def restore(*arguments, **options):
        settings.write_bytes(signed)
        return verify(*arguments, **options)

    monkeypatch.setattr(approval, "sha256_of", leave)
    monkeypatch.setattr(approval, "verify_order", restore)
    code, _, error = site.ask(request)
    assert code == 77 and "would be logged to 'wandb'" in error and not site.calls


@pytest.mark.parametrize(
    ("training", "key"),
    [
        ({"optimizer": "os:system"}, "training.optimizer"),
        ({"optimizer": "os.system"}, "training.optimizer"),
        ({"sync": {"policy": "subprocess:Popen"}}, "training.sync.policy"),
        ({"layout": {"schedule": "os:system"}}, "training.layout.schedule"),
    ],
)
def test_code_that_settings_name_is_that_of_listed_modules(site: Gate, training: dict, key: str):
    code, _, error = site.ask(site.round(**training))
    assert code == 77 and not site.calls, error
    assert f"{key} is" in error and "does not list" in error


def test_an_optimizer_of_the_sites_own_is_taken(site: Gate):
    site.policy(modules=["facility.train", "os"])
    code, _, error = site.ask(site.round(optimizer="os:system"))
    assert code == 0, error


def tasks(site: Gate, directory: Path) -> str:
    """The request of a round whose settings name tasks in a folder."""
    request = site.round()
    path = site.workdir / "in" / "alpha.json"
    path.write_text(path.read_text()[:-1] + f', "evaluation": {{"tasks": ["t"], "directory": "{directory}"}}}}')
    site.sign()
    return request


def test_tasks_are_read_in_the_sites_own_folders_alone(site: Gate):
    """A task's YAML may say `!function module.name`, which lm-eval imports from beside it and calls."""
    own, planted = site.home / "tasks", site.workdir / "tasks"
    for place in (own, planted):
        place.mkdir()
    for allowed, directory, taken in (
        ([], planted, False),
        ([], own, False),
        ([str(own)], planted, False),
        ([str(own)], site.workdir / "in" / ".." / ".." / "home" / "tasks", True),
        ([str(own)], own, True),
    ):
        site.policy(task_directories=allowed, node_hours_per_day=100.0)
        code, _, error = site.ask(tasks(site, directory))
        assert (code == 0) == taken, (allowed, directory, error)
        assert taken or "task_directories" in error


def test_lm_eval_sees_no_path_of_the_coordinators_making(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`pretrained=/w/m,trust_remote_code=True` would load code; a file `t` in its directory would be a task."""
    model = tmp_path / "m,trust_remote_code=True"
    model.mkdir()
    (model / "tokenizer.json").touch()
    calls = []

    def start(words: list[str], **options: object) -> None:
        calls.append((words, options))
        link = Path(words[words.index("--model_args") + 1].removeprefix("pretrained="))
        assert link.resolve() == model and not list(Path(str(options["cwd"])).iterdir())
        raise TransientError("started")

    monkeypatch.setattr(evaluation.subprocess, "Popen", start)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t").write_text("task: t")
    with pytest.raises(TransientError, match="started"):
        evaluation.evaluate_model(model, EvaluationSettings(tasks=["t"]), dataset=tmp_path)
    ((words, _),) = calls
    assert not any("," in word for word in words)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model", "tokenizer", "log", "whole", "empty"])
def test_no_task_is_called_as_what_lies_beside_lm_eval(tmp_path: Path, name: str):
    """`tasks: [model]` was the received model, whose YAML files lm-eval read, and whose module it imported and ran."""
    pytest.importorskip("lm_eval")
    model = tmp_path / "received"
    model.mkdir()
    (model / "tokenizer.json").touch()
    (model / "x.yaml").write_text("task: x\ndoc_to_text: !function evil.f\n")
    (model / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w').close()\ndef f(doc): return ''\n")
    with pytest.raises(TransientError, match=f"Tasks not found: {name}"):
        evaluation.evaluate_model(model, EvaluationSettings(tasks=[name]), dataset=tmp_path)
    assert not (tmp_path / "owned").exists()


def test_a_tracker_reads_no_settings_that_a_coordinator_put_beside_its_job(tmp_path: Path, monkeypatch):
    """wandb sent the site's key to the address in `wandb/settings` there."""
    import accelerate.tracking

    seen = []

    class Reads:
        requires_logging_directory = False

        def __init__(self, run: str) -> None:
            seen.append(Path("wandb/settings").exists())

        def start(self) -> None:
            seen.append(Path("wandb/settings").exists())

    job, state = tmp_path / "job", tmp_path / "state"
    for place in (job / "wandb", state):
        place.mkdir(parents=True)
    (job / "wandb" / "settings").write_text("[default]\nbase_url = https://elsewhere\n")
    monkeypatch.setattr(accelerate.tracking, "LOGGER_TYPE_TO_CLASS", {"wandb": Reads})
    monkeypatch.chdir(job)
    tracker = Tracker("wandb", Path("..") / "state", "run", SimpleNamespace(first=True))  # type: ignore[arg-type]
    assert not tracker.reason and seen == [False, False] and Path.cwd() == job
