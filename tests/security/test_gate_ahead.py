"""A job that waits behind a gate for its model: what it costs, what it runs, and what nobody gains by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.streamflow_plugin.gate import job_of
from facility.ahead import give_up
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.ahead import COMMAND, GIVEN_UP, WAITED
from facility.exchange.messages.report import read_failure
from facility.gating import ahead as gating_ahead
from facility.gating.ledger import Ledger, read_ledger
from facility.gating.policy import read_policy
from facility.gating.search_paths import SHELL
from tests.conftest import ROOT
from tests.security import test_gate
from tests.security.test_gate import Gate

site = test_gate.site
NAME = "crossfed-heron-alpha-ahead"


def ordered(site: Gate, **policy) -> str:
    """A round whose order came through the gate; returns the request that would submit another."""
    site.policy(ahead_seconds=300.0, **({"node_hours_per_day": 100.0} | policy))
    request = site.round()
    assert site.ask(request)[0] == 0
    return request


def ahead(site: Gate, wait: int = 60) -> tuple[int, bytes, str]:
    """Submit a job that waits; the scheduler calls it 18."""
    named(site, "18")
    site.active = "17\n18\n"
    answer = site.ask(f"crossfed-gate submit-ahead --settings {site.workdir}/in/alpha.json --wait {wait}")
    named(site, "17")
    return answer


def named(site: Gate, id: str) -> None:
    """The id of the next job."""

    def call(command, text=None, cwd=None):
        code, told = site.call(command, text, cwd)
        return (code, f"{id}\n" if command[0] == "sbatch" else told)

    site.monkeypatch.setattr("facility.gating.queue.run_program", call)


def handing(site: Gate, request: str, directory: str = "next", job: str = "18") -> str:
    (site.workdir / directory).mkdir(exist_ok=True)
    return request.replace("gate submit", f"gate hand-over --job {job}").replace("/job ", f"/{directory} ")


def place(site: Gate) -> Path:
    """Where the job waits."""
    (found,) = (site.home / "gate" / "ahead").iterdir()
    return found


def ledger(site: Gate) -> Ledger:
    return read_ledger(site.home / "gate" / "ledger.json")


def test_a_job_waits_and_is_given_an_approved_round_that_counts_once(site: Gate):
    request = ordered(site)
    code, out, error = ahead(site)
    assert (code, out) == (0, b"18\n"), error
    command, script = site.calls[-1]
    assert f"--job-name={NAME}" in command and "#SBATCH --partition=gpu" in (script or "")
    assert f"facility.ahead --directory {place(site)} --wait 60" in (script or "")
    before = ledger(site).node_hours(ledger(site).jobs[-1].submitted)
    assert before == 4.0
    code, _, error = site.ask(handing(site, request))
    assert code == 0, error
    told = (place(site) / COMMAND).read_text()
    assert told.startswith(f"{SHELL}; cd {site.workdir}/next && ") and "facility.round --out update" in told
    assert oct((place(site) / COMMAND).stat().st_mode)[-3:] == "600"
    assert ledger(site).node_hours(ledger(site).jobs[-1].submitted) == before
    assert [one["what"] for one in site.log()][-1] == "handed over"
    assert site.ask(f"crossfed-gate jobs {NAME}")[0] == 0 and site.ask("crossfed-gate states 18")[0] == 0


def test_what_a_waiting_job_runs_trains_the_round_it_was_given(site: Gate):
    """The script, run by a shell: it waits, finds the round and begins it, with nothing imported from beside it."""
    request, taken = ordered(site), site.folder / "taken"
    assert ahead(site)[0] == 0
    script = site.calls[-1][1] or ""
    assert site.ask(handing(site, request))[0] == 0
    (site.workdir / "next" / "json.py").write_text(f"import pathlib; pathlib.Path({str(taken)!r}).touch()\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "PYTHONPATH": str(ROOT), "CROSSFED_HOME": str(site.home)}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=200)
    assert not taken.exists(), done.stdout
    assert (site.workdir / "next" / "update" / "failure.json").is_file(), done.stdout
    code, out, _ = site.ask("crossfed-gate waited 18")
    assert code == 0 and json.loads(out)["handed"] is True
    assert site.ask(f"crossfed-gate get-file {site.workdir}/next/update/failure.json")[0] == 0


def test_a_lost_answer_is_given_again_and_a_second_round_is_not(site: Gate):
    request = ordered(site)
    ahead(site)
    for _ in range(2):
        assert site.ask(handing(site, request))[0] == 0
    told = (place(site) / COMMAND).read_text()
    assert site.ask(handing(site, request, "third"))[0] == 1
    assert (place(site) / COMMAND).read_text() == told and ledger(site).jobs[-1].directory.endswith("/next")


def test_a_job_that_has_decided_to_end_takes_no_round(site: Gate):
    request = ordered(site)
    ahead(site)
    give_up(place(site))
    assert site.ask(handing(site, request))[0] == 1
    assert (place(site) / COMMAND).read_text() == GIVEN_UP


def test_a_round_that_is_refused_ends_the_wait_and_leaves_its_reason(site: Gate):
    request = ordered(site)
    ahead(site)
    (site.workdir / "in" / "model" / "manifest.json").write_text("{}")
    code, _, error = site.ask(handing(site, request))
    assert code == 77 and (place(site) / COMMAND).read_text() == GIVEN_UP, error
    failure = read_failure(site.workdir / "next" / "update")
    assert failure is not None and "refused by the facility's gate" in failure.reason


def test_a_link_that_is_exchanged_before_the_round_is_given_ends_the_wait(site: Gate, monkeypatch: pytest.MonkeyPatch):
    """What the job would read then is not what the ledger holds for it."""
    request, clear = ordered(site), gating_ahead.clear_update
    ahead(site)

    def exchange(directory: Path) -> None:
        (site.workdir / "in" / "model" / "linked.safetensors").symlink_to(site.workdir / "elsewhere")
        clear(directory)

    monkeypatch.setattr(gating_ahead, "clear_update", exchange)
    code, _, error = site.ask(handing(site, request))
    assert code == 77 and "was exchanged while its job was approved" in error
    assert (place(site) / COMMAND).read_text() == GIVEN_UP


@pytest.mark.parametrize("exchanged", [True, False])
def test_no_round_is_given_in_a_directory_with_a_link(site: Gate, monkeypatch: pytest.MonkeyPatch, exchanged: bool):
    """Nor in one in whose place a link has come: the job would have left its update within another job's directory."""
    request, clear = ordered(site), gating_ahead.clear_update
    ahead(site)
    asked, directory, other = handing(site, request), site.workdir / "next", site.workdir / "other"
    other.mkdir()

    def exchange(found: Path) -> None:
        clear(found)
        if exchanged:
            directory.rmdir()
            directory.symlink_to(other)

    monkeypatch.setattr(gating_ahead, "clear_update", exchange)
    if not exchanged:
        assert site.ask(f"crossfed-gate link {other} {directory}/metrics")[0] == 0
    code, _, error = site.ask(asked)
    assert code == 77 and "is a link, and a job's directory holds none" in error
    assert (place(site) / COMMAND).read_text() == GIVEN_UP


@pytest.mark.parametrize(
    ("policy", "wait", "words"),
    [
        ({"ahead_seconds": 0.0}, 60, "lets no job wait"),
        ({"ahead_seconds": 300.0}, 301, "ahead_seconds is 300"),
        ({"ahead_seconds": 300.0, "node_hours_per_day": 3.0}, 60, "node_hours_per_day is 3"),
    ],
)
def test_a_policy_bounds_the_wait_and_its_node_hours(site: Gate, policy: dict, wait: int, words: str):
    ordered(site)
    site.policy(**policy)
    code, _, error = ahead(site, wait)
    assert code == 77 and words in error
    assert not any((site.home / "gate").glob("ahead/*")) and len(ledger(site).jobs) == 1


def test_without_a_signed_order_no_node_is_held(site: Gate):
    """Who has the ssh key and not the signing key: settings that no order named."""
    ordered(site)
    path = site.workdir / "in" / "alpha.json"
    path.write_text(path.read_text() + " ")
    code, _, error = ahead(site)
    assert code == 77 and "no signed order" in error


def test_one_job_a_federation_waits(site: Gate):
    ordered(site)
    assert ahead(site)[0] == 0
    code, _, error = ahead(site)
    assert code == 77 and "job 18 waits for a round already" in error
    site.active = "17\n"  # it has ended
    assert site.ask(f"crossfed-gate submit-ahead --settings {site.workdir}/in/alpha.json --wait 9")[0] == 0


def test_a_round_is_given_to_a_waiting_job_of_its_own_federation_alone(site: Gate):
    request = ordered(site)
    code, _, error = site.ask(handing(site, request, job="17"))
    assert code == 77 and "submitted with its round" in error
    code, _, error = site.ask(handing(site, request, job="99"))
    assert code == 77 and "not submitted through this gate" in error
    assert ahead(site)[0] == 0
    raw = json.loads((site.home / "gate" / "ledger.json").read_text())
    raw["jobs"][-1]["name"] = "crossfed-egret-alpha-ahead"
    (site.home / "gate" / "ledger.json").write_text(json.dumps(raw))
    code, _, error = site.ask(handing(site, request))
    assert code == 77 and "another federation's" in error


def test_no_request_reaches_the_place_where_a_job_waits(site: Gate):
    """Whoever writes `command` there runs a shell line at the facility."""
    ordered(site)
    ahead(site)
    found = place(site)
    for verb in ("put-file {} 600", "remove {}", "get-file {}", "make {}", "test -e {}", "sha1 {}", "put-tree {}"):
        code, _, error = site.ask(f"crossfed-gate {verb.format(found / COMMAND)}", data=b"id")
        assert code == 77 and "lies outside" in error, verb
    for verb in (f"link {found} {site.workdir}/l", f"copy {site.workdir}/in {found}/command", f"hold {found}"):
        assert site.ask(f"crossfed-gate {verb}")[0] == 77
    os.symlink(found, site.workdir / "l")  # as a job of the site's own could
    assert site.ask(f"crossfed-gate put-file {site.workdir}/l/{COMMAND} 600", data=b"id")[0] == 77
    assert not (found / COMMAND).exists()


def test_what_is_read_of_a_wait_is_short_and_no_link(site: Gate):
    ordered(site)
    ahead(site)
    assert site.ask("crossfed-gate waited 18")[0] == 1
    assert site.ask("crossfed-gate waited 17")[0] == 1
    (place(site) / WAITED).symlink_to("/etc/passwd")
    assert site.ask("crossfed-gate waited 18")[0] == 1
    (place(site) / WAITED).unlink()
    (place(site) / WAITED).write_text("x" * 10_000)
    code, out, _ = site.ask("crossfed-gate waited 18")
    assert code == 0 and len(out) == 4096 and sum(ledger(site).out.values()) == 4096


def test_the_workdir_is_not_below_the_gates_own_directory(site: Gate):
    site.policy(workdir=str(site.home / "gate" / "work"))
    with pytest.raises(ConfigurationError, match="gate's own directory"):
        read_policy(site.home / "policy.yml")


def test_the_coordinators_command_is_the_request(site: Gate):
    request = ordered(site)
    (site.workdir / "next").mkdir()
    words = request.split("--model")[1].split("--round")
    command = (
        f'export HOME="{site.workdir}/next" && export TMPDIR="{site.workdir}/tmp" && python3 -m facility.round '
        f"--out update --model{words[0]}--round{words[1]} 2>&1"
    )
    ahead(site)
    assert site.ask(job_of(command, "hand-over", "--job", "18"))[0] == 0
