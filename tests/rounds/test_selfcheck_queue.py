"""The self-check's job is the template's own script, given to the queue and waited for, with nothing left in $HOME."""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from facility.exchange.errors import InputError
from facility.selfcheck import removed, run
from tests.schedulers.recordings import recorded

TEMPLATES = Path(__file__).parents[2] / "templates"
STAND_IN = """#!/bin/sh
{ echo "$0 $*"; pwd; } >"$ASKED"
cat >"$ASKED.job"
mkdir update
"""
FLUX = """#!/bin/sh
case "$*" in
    *--wait*) printf '%s' "$REFUSED" >&2; exit 2 ;;
    'job status fake1') [ -s "$ASKED.job" ] && mkdir update; exit ;;
esac
{ echo "$0 $*"; pwd; } >"$ASKED"
cat >"$ASKED.job"
echo fake1
"""
"""`flux batch` prints the job's id and waits for nothing; `flux job status ID` waits for the job's end."""


@pytest.mark.parametrize(
    ("template", "fill", "words"),
    [
        ("slurm", {"account": "x", "partition": "p"}, "sbatch --wait "),
        ("pbs", {"account": "x", "queue": "q"}, "qsub -W block=true -j oe"),
        ("flux", {"bank": "x", "queue": "q"}, "flux batch --time-limit=10m "),
        ("gridengine", {"account": "x", "queue": "q"}, "qsub -sync y -j y -cwd"),
    ],
)
def test_the_script_itself_is_submitted_and_waited_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    template: str,
    fill: dict[str, str],
    words: str,
):
    """`flux submit` of a shell around it would be no nested instance, whose `flux run` waits for the site's for ever
    (recorded: `flux-jobs-selfcheck-deadlock`). `flux batch` has no `--wait`: every set-up of a Flux site failed."""
    programs, folder = tmp_path / "bin", tmp_path / "selfcheck"
    programs.mkdir()
    (folder / "job").mkdir(parents=True)
    program = programs / words.split()[0]
    program.write_text(FLUX if template == "flux" else STAND_IN)
    program.chmod(0o700)
    monkeypatch.setenv("REFUSED", recorded("flux-batch-wait").err)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    with caplog.at_level(logging.INFO):
        run(folder, TEMPLATES / f"{template}.sh", fill, tmp_path / "home", 60.0)
    assert caplog.messages[0] == f"running in a job of the queue, by {words.split()[0]}"
    asked, place = (tmp_path / "asked").read_text().splitlines()
    assert words in f"{asked} " and place == str(folder / "job"), "where a queue leaves what a job prints"
    script = (tmp_path / "asked.job").read_text()
    assert script.startswith("#!/bin/bash\n") and "facility.round" in script
    assert "<" not in "".join(
        line for line in script.splitlines() if line.startswith(("#SBATCH", "#PBS", "#flux", "#$"))
    )


def test_without_directives_the_job_runs_here_and_no_queue_is_spoken_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """setup.sh said "in a job of the queue" of any template, that of a plain ssh login too."""
    (tmp_path / "selfcheck" / "job").mkdir(parents=True)
    (tmp_path / "own.sh").write_text("#!/bin/bash\nmkdir update\n: {{ streamflow_command }}\n")
    with caplog.at_level(logging.INFO):
        run(tmp_path / "selfcheck", tmp_path / "own.sh", {}, tmp_path / "home", 60.0)
    assert caplog.messages == [f"running here, on {platform.node()}"]


def test_what_looks_like_jinja2_in_a_template_reaches_the_job_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """sbatch refuses a script that does not begin with `#!`."""
    (tmp_path / "selfcheck" / "job").mkdir(parents=True)
    (tmp_path / "sbatch").write_text(STAND_IN)
    (tmp_path / "sbatch").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    own = '{% raw %}echo "${#hosts[@]}"{% endraw %}\n\n'
    (tmp_path / "own.sh").write_text(f'{{% extends "slurm.sh" %}}\n{{% block environment %}}\n{own}{{% endblock %}}\n')
    run(tmp_path / "selfcheck", tmp_path / "own.sh", {"account": "x", "partition": "p"}, tmp_path / "home", 60.0)
    script = (tmp_path / "asked.job").read_text()
    assert script.startswith("#!/bin/bash\n") and '\necho "${#hosts[@]}"\n' in script and "raw" not in script


LATE = """#!/bin/sh
cat >/dev/null
echo 1.head
( sleep 0.3; echo 'ModuleNotFoundError: no torch' >"$PWD/STDIN.o1" ) >/dev/null 2>&1 &
"""


def test_a_job_that_left_no_update_is_told_by_what_it_printed_though_the_queue_brings_that_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PBS copies a job's output after the job has ended, and `qsub -W block=true` does not wait for that."""
    (tmp_path / "selfcheck" / "job").mkdir(parents=True)
    (tmp_path / "qsub").write_text(LATE)
    (tmp_path / "qsub").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(InputError, match=r"left no update \(qsub ended with 0\): ModuleNotFoundError: no torch"):
        run(tmp_path / "selfcheck", TEMPLATES / "pbs.sh", {"account": "x", "queue": "q"}, tmp_path / "home", 60.0)


def test_what_a_queue_brings_while_the_folder_is_removed_goes_as_well(tmp_path: Path) -> None:
    """Seen with PBS: the folder was no longer empty when it was to go, and a self-check that had passed failed."""
    folder = tmp_path / "selfcheck"
    (folder / "job").mkdir(parents=True)

    def bring() -> None:
        began = time.monotonic()
        while time.monotonic() - began < 0.4:
            with suppress(OSError):
                (folder / "job" / f"STDIN.o{time.monotonic_ns()}").touch()

    thread = threading.Thread(target=bring)
    thread.start()
    assert removed(folder) and not folder.exists()
    thread.join()
    assert not folder.exists()
