"""Both sides of the gate agree: a run's commands become requests, and every request is one that a gate knows."""

from __future__ import annotations

import shlex

import pytest
from streamflow.core.exception import WorkflowExecutionException

from coordinator.config.deployments import GATED
from coordinator.schedulers.gated import Gated
from coordinator.schedulers.registry import schedulers
from coordinator.streamflow_plugin.dialect import GateDialect
from coordinator.streamflow_plugin.gate import job_of, request_of
from facility.gating.grammar import FORMS, parse_request
from facility.gating.queue import TABLE
from facility.gating.refusal import Refused

PLACE = "/scratch/alice/work/7ee116fb-1681-4e9f-9d35-d7c3b9c6af35"
RECORDED = {
    f"test -e {PLACE} && readlink -f {PLACE}": "resolve",
    f"test -f {PLACE}/a.json && sha1sum {PLACE}/a.json | awk '{{print $1}}'": "sha1",
    f"test -d {PLACE}": "test",
    f'test -d "{PLACE}"': "test",
    f"test -L {PLACE}/model": "test",
    f"mkdir -m 777 -p {PLACE}": "make",
    f"find -L {PLACE}/update -mindepth 1 -maxdepth 1 -type d": "walk",
    f"head -c 4096 {PLACE}/progress.json": "get-file",
    f"rm -rf {PLACE}": "remove",
    f"ln -snf {PLACE}/a {PLACE}/b": "link",
}
"""What StreamFlow sent in a federation of two rounds over two Slurm clusters, and what it sends to copy in place."""
JOB = (
    f'cd {PLACE} && export HOME="{PLACE}" && export TMPDIR="{PLACE}-tmp" && python3 -m facility.round --out update '
    f"--dataset /data/it --model {PLACE}/model --round 0 --settings {PLACE}/a.json 2>&1"
)
"""The command of a training job, as recorded there."""


@pytest.mark.parametrize("command", RECORDED)
def test_every_recorded_command_of_the_engine_is_a_request(command: str):
    assert parse_request(request_of(command)).verb == RECORDED[command]


def test_a_recorded_training_job_is_a_request_with_the_same_values():
    request = parse_request(job_of(JOB, "submit"))
    assert request.given == {
        "directory": PLACE,
        "temporary": f"{PLACE}-tmp",
        "model": f"{PLACE}/model",
        "settings": f"{PLACE}/a.json",
        "dataset": "/data/it",
        "round": "0",
    }


@pytest.mark.parametrize(
    "command",
    ["id", f"test -d {PLACE}; id", f"rm -rf {PLACE} && id", f"test -e {PLACE} && readlink -f /etc", "sbatch x"],
)
def test_another_command_is_an_error_here_or_refused_there(command: str):
    with pytest.raises((WorkflowExecutionException, Refused)):
        parse_request(request_of(command))


LOGIN = JOB.replace("facility.round", "facility.{0}").replace(f"--model {PLACE}/model", "{1}")
"""The same form, for the commands of secure aggregation."""


@pytest.mark.parametrize(
    ("module", "verb", "more"), [("keys", "keys", ""), ("unmask", "unmask", f"--request {PLACE}/r")]
)
def test_commands_of_secure_aggregation_are_requests_and_no_jobs(module: str, verb: str, more: str):
    request = parse_request(job_of(LOGIN.format(module, more), "run"))
    assert request.verb == verb and request["directory"] == PLACE and request["round"] == "0"
    assert request.given.get("request", "") == more.removeprefix("--request ")
    with pytest.raises(WorkflowExecutionException):
        job_of(LOGIN.format(module, more), "submit")


def test_a_masked_training_job_carries_its_roster():
    assert (
        parse_request(job_of(JOB.replace("--round 0", f"--roster {PLACE}/ro --round 0"), "submit"))["roster"]
        == f"{PLACE}/ro"
    )


@pytest.mark.parametrize("job", ["python3 -m os", JOB.replace("facility.round", "facility.train"), JOB + " ; id"])
def test_another_job_is_no_request(job: str):
    with pytest.raises((WorkflowExecutionException, Refused)):
        parse_request(job_of(job, "submit"))


def test_every_request_of_a_transfer_is_known():
    gate = GateDialect()
    lines = [gate.nothing, gate.hold, gate.sizes, gate.put_tree(PLACE), gate.put_file(PLACE, 0o644, empty=True)]
    lines += [gate.put_piece(PLACE, 0, 5), gate.confirmed(gate.put_piece(PLACE, 7, 5)), gate.listing(PLACE)]
    lines += [gate.get_piece(PLACE, 0, 5), gate.get_file(PLACE), gate.get_tree(PLACE)]
    assert {parse_request(line).verb for line in lines} <= set(FORMS)


@pytest.mark.parametrize("name", sorted(schedulers()))
def test_every_request_to_a_queue_is_known_and_the_gate_has_the_schedulers_commands(name: str):
    gated = Gated(schedulers()[name])
    ids = {"slurm": ["17", "18"], "pbs": ["17.server", "18.server"], "flux": ["ƒ2JSnREKh", "f2J"]}.get(name, ["17"])
    lines = [gated.listing("crossfed-a-b"), gated.cancel("crossfed-a-b"), gated.cancel_waiting("crossfed-a-b")]
    lines += [gated.cancel_ids(ids), gated.query(ids), gated.query_ending(ids[0]), gated.end_of_output(ids[0], "/x")]
    assert [parse_request(gated.line(line)).verb for line in lines] == [
        "jobs",
        "cancel",
        "cancel-waiting",
        "cancel-ids",
        "states",
        "ending",
        "output",
    ]
    assert name == "ssh" or (name in TABLE) == (name in GATED)
    if name in TABLE and (line := gated.query_begin(ids[0])):
        assert parse_request(line).verb == "begins"
        assert shlex.split(schedulers()[name].query_begin("ID")) == list(TABLE[name].begins)


@pytest.mark.parametrize("name", sorted(TABLE))
def test_the_gate_runs_what_the_coordinator_would_have_sent(name: str):
    """The words of each command are those of the shell line that a coordinator without a gate sends."""
    scheduler, table = schedulers()[name], TABLE[name]
    ours = shlex.split(scheduler.query(["ID"]))
    theirs = ["ID" if word in ("LIST", "IDS") else word for word in table.states]
    assert theirs == ours
    assert [shlex.split(part) for part in scheduler.query_ending("ID").split(" || ")] == [list(f) for f in table.ending]
    listing = scheduler.listing("NAME").replace('"$(id -un)"', "USER").replace("$ids", "IDS")
    for words in (table.found, *table.listing):
        assert shlex.join(words) in listing, words
