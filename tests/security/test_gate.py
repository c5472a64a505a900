"""The gate's laws, request by request: what a federation needs is done, everything else is refused and logged."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import tarfile
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from facility import gate
from facility.exchange.errors import ConfigurationError
from facility.exchange.files.audit_log import verify_log
from facility.exchange.files.sweep import remove_transferred
from facility.exchange.messages.manifest import Manifest, sha256_of, with_run, write_manifest
from facility.exchange.messages.order import sign_order
from facility.exchange.messages.report import read_failure
from facility.gating import queue
from facility.gating.grammar import FORMS
from facility.gating.ledger import JobEntry
from facility.gating.policy import read_policy
from facility.gating.search_paths import SHELL
from facility.gating.session import Session
from tests.conftest import ROOT

KEY = "SHA256:" + "A" * 43


class Gate:
    """A gate with a scheduler that answers as the recorded sbatch does, and files around it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary) -> None:
        self.folder, self.monkeypatch, self.capture = folder, monkeypatch, capfdbinary
        self.workdir, self.home = folder / "work", folder / "home"
        for place in (self.workdir, self.home, self.home / "data"):
            place.mkdir()
        self.key = self.home / "coordinator"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key], check=True)
        public = " ".join(self.key.with_suffix(".pub").read_text().split()[:2])
        (self.home / "coordinators").write_text(f'heron namespaces="crossfed" {public}\n')
        (self.home / "site.sh").write_text("#!/bin/bash\n#SBATCH --partition=<partition>\n{{ streamflow_command }}\n")
        self.policy()
        self.calls: list[tuple[list[str], str | None]] = []
        self.active = ""
        monkeypatch.setattr(queue, "run_program", self.call)
        monkeypatch.setenv("CROSSFED_HOME", str(self.home))

    def policy(self, **changes) -> None:
        values = {
            "facility": "alpha",
            "federations": ["heron"],
            "keys": [KEY],
            "coordinators": str(self.home / "coordinators"),
            "workdir": str(self.workdir),
            "datasets": [str(self.home / "data")],
            "scheduler": "slurm",
            "template": str(self.home / "site.sh"),
            "fill": {"partition": "gpu"},
            "hours": 2.0,
            "node_hours_per_day": 5.0,
        }
        (self.home / "policy.yml").write_text(json.dumps(values | changes))

    def call(self, command, text=None, cwd=None):
        self.calls.append((list(command), text))
        return (0, "17\n") if command[0] == "sbatch" else (0, self.active)

    def ask(self, request: str, data: bytes = b"", key: str = KEY) -> tuple[int, bytes, str]:
        """Exit code, output and complaint of one request."""
        self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        session = Session(policy=read_policy(self.home / "policy.yml"), key=key, state=self.home / "gate")
        session.state.mkdir(exist_ok=True)
        self.capture.readouterr()
        code = gate.serve(session, request)
        sys.stdout.flush()
        out, error = self.capture.readouterr()
        return code, out, error.decode()

    def round(
        self,
        number: int = 0,
        run: str = "a" * 32,
        trainer: str = "facility.train",
        privacy: dict | None = None,
        **training,
    ) -> str:
        """Stage a signed model and settings and a job's directory; returns the request that submits them.

        `privacy`: changes of a sound `differential` section; None: there is none.
        """
        model, settings = self.workdir / "in" / "model", self.workdir / "in" / "alpha.json"
        model.mkdir(parents=True, exist_ok=True)
        (model / "model.safetensors").write_bytes(b"weights")
        raw = {"federation": "heron", "facility": "alpha", "rounds": 5, "seed": 1, "training": training}
        raw |= {} if trainer == "facility.train" else {"trainer": {"module": trainer}}
        if privacy is not None:
            raw["differential"] = {"epsilon": 2.0, "delta": 1e-6} | privacy
        settings.write_text(json.dumps(raw))
        write_manifest(model, Manifest(kind="model", federation="heron", round=number))
        with_run(model, run)
        self.sign()
        for name in ("job", "tmp"):
            (self.workdir / name).mkdir(exist_ok=True)
        w = self.workdir
        return (
            f"crossfed-gate submit --directory {w}/job --temporary {w}/tmp --model {model} --settings {settings} "
            f"--dataset {self.home}/data --round {number}"
        )

    def sign(self, key: Path | None = None) -> None:
        settings = {"alpha": sha256_of(self.workdir / "in" / "alpha.json")}
        sign_order(self.workdir / "in" / "model", key or self.key, settings=settings, expires=time.time() + 60)

    def log(self) -> list[dict]:
        path = self.home / "gate" / "audit.jsonl"
        assert verify_log(path).broken == 0
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def site(tmp_path, monkeypatch, capfdbinary) -> Gate:
    return Gate(tmp_path.resolve(), monkeypatch, capfdbinary)


def packed(**files: bytes) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


COMMANDS = [
    None,
    "",
    "bash",
    "sh -c id",
    "crossfed-gate",
    "crossfed-gate shell",
    "crossfed-gate jobs crossfed-heron-alpha; id",
    "crossfed-gate jobs $(id)",
    "crossfed-gate test -e /etc/passwd && id",
    "crossfed-gate test -e {w}/../home",
    "crossfed-gate make {w}/x\nid",
    "crossfed-gate make {w}/`id`",
    "crossfed-gate make relative",
    "crossfed-gate make",
    "crossfed-gate put-file {w}/x 4755",
    "crossfed-gate put-piece {w}/x -1 5",
    "crossfed-gate put-piece {w}/x 0",
    "crossfed-gate cancel-ids --all",
    "crossfed-gate submit --directory {w}/job",
    "crossfed-gate submit --directory {w}/job --directory {w}/job",
    "crossfed-gate jobs 'unclosed",
    "scp -t /tmp",
    "/usr/lib/openssh/sftp-server",
    "crossfed-gate " + "x" * 9000,
]


@pytest.mark.parametrize("command", COMMANDS)
def test_whatever_is_no_request_is_refused_told_and_logged(site: Gate, command: str | None):
    text = command and command.replace("{w}", str(site.workdir))
    code, out, error = site.ask(text)
    assert code == 77 and out == b"" and error.startswith("refused by the gate: ")
    assert [entry["what"] for entry in site.log()] == ["refused"] and site.calls == []


@pytest.mark.parametrize(
    ("type", "why"),
    [
        (tarfile.GNUTYPE_LONGNAME, "bytes of headers"),
        (tarfile.XHDTYPE, "pax headers"),
        (tarfile.XGLTYPE, "pax headers"),
    ],
)
def test_a_header_without_end_is_refused_before_it_fills_the_memory(site: Gate, type: bytes, why: str):
    header = tarfile.TarInfo("x")
    header.type, header.size = type, 1 << 40
    data = header.tobuf(tarfile.GNU_FORMAT) + b"x" * (64 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, _, error = site.ask(f"crossfed-gate put-tree {site.workdir}/in", data=data)
    assert code == 77 and why in error
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 48 << 10


def test_a_stream_of_headers_alone_is_refused_with_a_reason(site: Gate):
    """Long names of long names, each of which `tarfile` reads by calling itself."""
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 1
    one = header.tobuf(tarfile.GNU_FORMAT) + b"y" + bytes(511)
    code, _, error = site.ask(f"crossfed-gate put-tree {site.workdir}/in", data=one * 2000)
    assert code == 77 and "no tar stream" in error


@pytest.mark.parametrize("pad", [" " * 2000, "''" * 1000], ids=["blanks", "quotes"])
def test_the_log_holds_every_word_of_a_request_however_it_is_padded(site: Gate, pad: str):
    words = " ".join(f"{site.workdir}/{number:040}" for number in range(40))
    assert site.ask(f"crossfed-gate {pad}make {words}")[0] == 0
    assert site.log()[-1] | {"what": "request", "request": f"crossfed-gate make {words}"} == site.log()[-1]


def test_another_key_is_refused_whatever_it_asks(site: Gate):
    for verb in FORMS:
        code, _, error = site.ask(f"crossfed-gate {verb}", key="SHA256:" + "B" * 43)
        assert code == 77 and "not one of the policy's" in error


def paths(site: Gate) -> dict[str, str]:
    """Ways out of the workdir."""
    os.symlink(site.home, site.workdir / "out")
    os.symlink(site.home / "policy.yml", site.workdir / "policy")
    return {
        "absolute": str(site.home / "policy.yml"),
        "beside": f"{site.workdir}-other/x",
        "through a directory's link": f"{site.workdir}/out/policy.yml",
        "through a file's link": f"{site.workdir}/policy",
        "root": "/",
    }


VERBS = [
    "resolve {p}",
    "sha1 {p}",
    "walk f {p}",
    "test -e {p}",
    "make {p}/new",
    "remove {p}",
    "link {p} {w}/x",
    "link {w} {p}",
    "put-file {p} 600",
    "put-tree {p}",
    "put-piece {p} 0 1",
    "list {p}",
    "get-file {p}",
    "get-piece {p} 0 10",
    "get-tree {p}",
]


@pytest.mark.parametrize("verb", VERBS)
def test_no_request_leaves_the_workdir(site: Gate, verb: str):
    before = sorted(str(path) for path in site.home.rglob("*") if "gate" not in path.parts)
    policy = (site.home / "policy.yml").read_bytes()
    for name, path in paths(site).items():
        request = "crossfed-gate " + verb.format(p=path, w=site.workdir)
        code, out, _ = site.ask(request, data=b"x")
        # A link itself lies inside: these replace or remove it, and nothing that it leads to.
        own_link = name.endswith("file's link") and verb.split()[0] in ("remove", "put-file", "put-tree", "link")
        if not own_link:
            assert code != 0 and out == b"", (name, request)
    assert (site.home / "policy.yml").read_bytes() == policy
    assert sorted(str(path) for path in site.home.rglob("*") if "gate" not in path.parts) == before


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a//b"])
def test_a_tar_stream_stays_inside_its_directory(site: Gate, name: str):
    code, _, _ = site.ask(f"crossfed-gate put-tree {site.workdir}/in", data=packed(**{name: b"x"}))
    assert code == 77 and not (site.workdir / "x").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_a_tar_stream_brings_files_and_directories_only(site: Gate, kind: bytes):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        entry = tarfile.TarInfo("x")
        entry.type, entry.linkname = kind, "/etc/passwd"
        archive.addfile(entry)
    assert site.ask(f"crossfed-gate put-tree {site.workdir}/in", data=stream.getvalue())[0] == 77


def test_directories_below_one_another_are_no_more_than_a_job_can_remove(site: Gate):
    """Level by level they were thousands, and what removes them ended in a RecursionError: the sweep of every job."""
    transfer = site.workdir / str(uuid.uuid4()) / str(uuid.uuid4())
    code, _, error = site.ask(f"crossfed-gate make {transfer}/model{'/d' * 40}")
    assert code == 77 and "levels below" in error
    for levels, expected in ((40, 77), (25, 0)):
        tree = packed(**{"/".join("d" * levels): b"x"})
        assert site.ask(f"crossfed-gate put-tree {transfer}/model", tree)[0] == expected
    job = site.workdir / str(uuid.uuid4())
    job.mkdir()
    assert remove_transferred(job, transfer / "model") and not transfer.exists()


def test_what_is_put_arrives_privately_and_in_pieces(site: Gate):
    w = site.workdir
    assert site.ask(f"crossfed-gate put-tree {w}/m", data=packed(**{"a/b": b"small", "large": b""}))[0] == 0
    code, out, _ = site.ask(f"crossfed-gate put-piece {w}/m/large 3 4", data=b"5678")
    assert (code, out) == (0, b"crossfed-arrived\n")
    site.ask(f"crossfed-gate put-piece {w}/m/large 0 3", data=b"abc")
    assert (w / "m/large").read_bytes() == b"abc5678" and (w / "m/a/b").read_bytes() == b"small"
    assert all(path.stat().st_mode & 0o077 == 0 for path in (w / "m").rglob("*"))
    assert site.ask("crossfed-gate sizes", data=f"{w}/m/large\0".encode())[1] == b"7\n"
    assert site.ask(f"crossfed-gate put-piece {w}/m/large 0 9", data=b"abc")[0] == 2, "the connection ended early"


def test_only_a_jobs_update_and_progress_leave(site: Gate):
    assert site.ask(site.round())[0] == 0
    w = site.workdir
    (w / "job/update/deep").mkdir(parents=True)
    (w / "job/update/deep/manifest.json").write_text("told")
    assert site.ask(f"crossfed-gate get-file {w}/job/progress.json")[:2] == (
        1,
        b"",
    )  # none so far, which is not a failure
    assert site.log()[-1]["what"] == "request"
    (w / "job/progress.json").write_text("{}")
    (w / "job/secret").write_text("secret")
    os.symlink(site.home / "data", w / "job/update/data")
    for path in ("in/alpha.json", "in/model", "job/secret", "job", "job/update/data", "tmp"):
        for verb in ("get-file", "list", "get-tree"):
            code, out, _ = site.ask(f"crossfed-gate {verb} {w}/{path}", data=b"manifest.json\0")
            assert code == 77 and out == b"", path
    assert site.ask(f"crossfed-gate get-file {w}/job/progress.json")[1] == b"{}"
    os.unlink(w / "job/update/data")
    assert b"deep/manifest.json" in site.ask(f"crossfed-gate list {w}/job/update")[1]
    _, out, _ = site.ask(f"crossfed-gate get-tree {w}/job/update", data=b"deep/manifest.json\0")
    assert tarfile.open(fileobj=io.BytesIO(out)).extractfile("deep/manifest.json").read() == b"told"
    assert site.ask(f"crossfed-gate get-piece {w}/job/update/deep/manifest.json 1 2")[1] == b"ol"


def test_the_script_is_the_sites_own(site: Gate):
    code, out, _ = site.ask(site.round())
    assert (code, out) == (0, b"17\n")
    command, script = site.calls[-1]
    assert command[:2] == ["sbatch", "--parsable"] and "--job-name=crossfed-heron-alpha" in command
    assert script is not None and script.startswith(f"#!/bin/bash\n#SBATCH --partition=gpu\n{SHELL}; cd ")
    w = site.workdir
    digests = f"{sha256_of(w / 'in/model/manifest.json')} {sha256_of(w / 'in/alpha.json')}"
    assert f"python3 -m facility.round --out update --model {w}/in/model" in script
    assert f"--approved {digests}" in script and f"CROSSFED_COORDINATORS={site.home}/coordinators" in script


def test_a_trainer_of_ones_own_runs_where_the_policy_names_it(site: Gate):
    site.policy(modules=["my.train"])
    assert site.ask(site.round(trainer="my.train"))[0] == 0
    _, script = site.calls[-1]
    assert script is not None and "--module my.train " in script
    code, _, error = site.ask(site.round(trainer="my.train") + " --module facility.train")
    assert code == 77 and "'facility.train' would train" in error


REFUSALS = {
    "another dataset": (lambda s: s.round().replace(f"{s.home}/data", "/etc"), {}, "not one of the policy's"),
    "another module": (lambda s: s.round() + " --module os", {}, "'os' would train"),
    "another trainer": (lambda s: s.round(trainer="os"), {}, "'os' would train, the policy allows facility.train"),
    "unsigned": (
        lambda s: (s.round(), (s.workdir / "in/model/manifest.json.sig").unlink())[0],
        {},
        "holds no manifest.json.sig",
    ),
    "other settings": (
        lambda s: (
            s.round(),
            (s.workdir / "in/alpha.json").write_text(
                (s.workdir / "in/alpha.json").read_text().replace('"seed": 1', '"seed": 2')
            ),
        )[0],
        {},
        "not those that the coordinator signed",
    ),
    "another round": (lambda s: s.round(2).replace("--round 2", "--round 3"), {}, "order is for round 2"),
    "whole models": (lambda s: s.round(), {"adapters_only": True}, "low-rank adapters only"),
    "whole modules": (
        lambda s: s.round(lora={"rank": 1, "modules_to_save": ["score", "layers"]}),
        {"adapters_only": True},
        "modules 'layers' would be trained whole",
    ),
    "every module": (
        lambda s: s.round(lora={"rank": 1, "modules_to_save": ["l"]}),
        {"adapters_only": True},
        "low-rank adapters only",
    ),
    "adapters as large as the model": (
        lambda s: s.round(lora={"rank": 65}),
        {"adapters_only": True},
        "adapters of rank 65 would be trained, the policy's adapters_rank is 64",
    ),
    "adapters of more than the site's rank": (
        lambda s: s.round(lora={"rank": 9}),
        {"adapters_only": True, "adapters_rank": 8},
        "adapters_rank is 8",
    ),
    "another encoding": (lambda s: s.round(), {"encodings": ["delta-int8"]}, "would travel as 'full'"),
    "another base": (lambda s: s.round(), {"models": ["0" * 64]}, "not among the policy's models"),
    "unmasked": (lambda s: s.round(), {"secure_aggregation": True}, "wants secure aggregation"),
    "no privacy": (lambda s: s.round(), {"epsilon": 3.0}, "wants differential privacy"),
    "a dataset's budget without privacy": (lambda s: s.round(), {"dataset_epsilon": 8.0}, "for all federations on one"),
    "a dataset's budget": (
        lambda s: s.round(privacy={"epsilon": 9.0}),
        {"dataset_epsilon": 8.0},
        "an epsilon of 9, the",
    ),
    "too little privacy": (lambda s: s.round(privacy={"epsilon": 4.0}), {"epsilon": 3.0}, "an epsilon of 4, the"),
    "too large a delta": (
        lambda s: s.round(privacy={"delta": 1e-3}),
        {"epsilon": 3.0, "delta": 1e-5},
        "a delta of 0.001, the policy allows 1e-05",
    ),
    "blocks": (lambda s: s.round(privacy={"unit": "block"}), {"epsilon": 3.0, "unit": "document"}, "whole documents"),
    "a delta that gives all away, within a dataset's budget": (
        lambda s: s.round(privacy={"delta": 0.9}),
        {"dataset_epsilon": 8.0, "delta": 1e-5},
        "a delta of 0.9, the policy allows 1e-05",
    ),
    "blocks, within a dataset's budget": (
        lambda s: s.round(privacy={"unit": "block"}),
        {"dataset_epsilon": 8.0, "unit": "document"},
        "whole documents",
    ),
    "a tracker": (lambda s: s.round(tracker="wandb"), {}, "would be logged to 'wandb'"),
    "another federation": (lambda s: s.round(), {"federations": ["egret"]}, "the policy allows 'alpha' in egret"),
    "over the day's hours": (lambda s: s.round(), {"node_hours_per_day": 1.0}, "node_hours_per_day is 1"),
}
BESIDE_SETTINGS = {
    "another module",
    "unsigned",
    "other settings",
    "another round",
    "another base",
    "over the day's hours",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_the_policy_does_not_allow_is_refused_before_a_node_hour_with_the_reason_in_the_table(
    site: Gate, name: str
):
    make, changes, reason = REFUSALS[name]
    site.policy(**changes)
    code, _, error = site.ask(make(site))
    assert code == 77 and reason in error, error
    assert not [command for command, _ in site.calls if command[0] == "sbatch"]
    assert reason in site.log()[-1]["reason"]
    listed = site.ask(f"crossfed-gate list {site.workdir}/job/update")[1]
    assert b"failure.json" in listed, "the coordinator can fetch the reason"
    failure = read_failure(site.workdir / "job" / "update")
    assert failure is not None and reason in failure.reason and failure.facility == "alpha"


@pytest.mark.parametrize("name", REFUSALS)
def test_settings_are_judged_before_any_job_as_they_are_with_one(site: Gate, name: str):
    """What lies in files beside them apart: the model, its order, and what the site has used of its day."""
    make, changes, reason = REFUSALS[name]
    site.policy(**changes)
    submitting = make(site)
    settings = (site.workdir / "in" / "alpha.json").read_bytes()
    dataset = shlex.split(submitting)[shlex.split(submitting).index("--dataset") + 1]
    log = site.home / "gate"
    before = {path for path in site.folder.rglob("*") if log not in (path, *path.parents)}
    code, out, error = site.ask(f"crossfed-gate test-settings --dataset {dataset}", settings)
    if name in BESIDE_SETTINGS:
        assert (code, out) == (0, b"the policy allows what the settings ask for\n")
    else:
        assert code == 77 and reason in error and reason in site.log()[-1]["reason"], error
    assert site.calls == [] and {path for path in site.folder.rglob("*") if log not in (path, *path.parents)} == before
    assert not list(log.glob("settings*"))


ODD = {
    "nested": ('{"a":' + "[" * 200_000 + "]" * 200_000 + "}").encode(),
    "digits": b'{"rounds": ' + b"9" * 5000 + b"}",
    "a lone surrogate": b'{"federation": "\\ud800"}',
    "not a number": b'{"rounds": NaN}',
    "a list": b"[]",
    "UTF-16": b"\xff\xfe{\x00}\x00",
    "terabytes": b"",
}


@pytest.mark.parametrize("file", ["in/alpha.json", "in/model/manifest.json"])
@pytest.mark.parametrize("name", ODD)
def test_odd_settings_and_manifests_are_refused_at_once_with_the_reason(site: Gate, name: str, file: str):
    request, place = site.round(), site.workdir / file
    place.write_bytes(ODD[name])
    if not ODD[name]:
        os.truncate(place, 1 << 40)  # a sparse file, as put-piece makes it
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    code, _, error = site.ask(request)
    assert code == 77 and error.startswith("refused by the gate: "), error
    assert site.log()[-1]["what"] == "refused" and not [one for one, _ in site.calls if one[0] == "sbatch"]
    failure = read_failure(site.workdir / "job" / "update")
    assert failure is not None and failure.facility == "alpha"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000 and time.process_time() - begun < 5


@pytest.mark.parametrize(("kind", "taken"), [("models", True), ("alone", True), ("update", False)])
def test_what_follows_the_last_round_is_submitted_as_any_job_is(site: Gate, kind: str, taken: bool):
    request, model = site.round(5), site.workdir / "in" / "model"
    write_manifest(model, Manifest(kind=kind, federation="heron", round=5))
    with_run(model, "a" * 32)
    site.sign()
    assert (site.ask(request)[0] == 0) == taken


def test_held_out_data_is_read_only_where_the_policy_names_it(site: Gate):
    request, settings = site.round(), site.workdir / "in" / "alpha.json"
    for dataset, code in ((f"{site.home}/data", 0), ("/etc", 77)):
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"evaluation": {"held_out": dataset}}))
        site.sign()
        assert site.ask(request)[0] == code, dataset


def test_node_hours_are_counted_by_what_was_used(site: Gate):
    """Two hours each and five a day: two jobs fit; a third does once one has ended at once."""
    site.active = "17\n"
    assert [site.ask(site.round())[0] for _ in range(2)] == [0, 0]
    assert site.ask(site.round())[0] == 77
    site.active = ""
    assert site.ask(site.round())[0] == 0


def test_a_clock_that_is_set_back_makes_no_job_count_less_than_nothing():
    """A job that was seen to end before it was submitted took hours off what the others had used."""
    before = JobEntry(id="1", name="n", directory="/d", submitted=10_000.0, nodes=2, hours=3.0, ended=10_000.0 - 7200)
    assert before.node_hours == 6.0, "what it used is not known"
    assert dataclasses.replace(before, ended=0.0).node_hours == 6.0
    assert dataclasses.replace(before, ended=11_800.0).node_hours == 1.0


def test_bytes_that_leave_are_counted_before_they_leave(site: Gate):
    site.policy(bytes_out_per_day=1000)
    site.ask(site.round())
    (site.workdir / "job/update").mkdir()
    (site.workdir / "job/update/x").write_bytes(bytes(600))
    request = f"crossfed-gate get-file {site.workdir}/job/update/x"
    assert len(site.ask(request)[1]) == 600
    code, out, error = site.ask(request)
    assert (code, out) == (77, b"") and "bytes_out_per_day is 1000" in error
    assert len(site.ask(f"crossfed-gate get-piece {site.workdir}/job/update/x 0 400")[1]) == 400


def test_only_our_jobs_are_asked_about_and_cancelled(site: Gate):
    site.ask(site.round())
    for request in ("states 18", "ending 18", "cancel-ids 17 18", "output 18", "jobs other", "cancel crossfed-heron-b"):
        calls = len(site.calls)
        assert site.ask(f"crossfed-gate {request}")[0] == 77 and len(site.calls) == calls, request
    assert site.ask("crossfed-gate states 17")[0] == 0
    assert site.calls[-1][0] == ["squeue", "-h", "-t", "all", "-o", "%i %T", "-j", "17"]
    assert site.ask("crossfed-gate cancel-ids 17")[0] == 0 and site.calls[-1][0] == ["scancel", "17"]


def test_a_job_of_a_host_is_ended_whole_where_one_process_takes_another_with_it(
    site: Gate, monkeypatch: pytest.MonkeyPatch
):
    """One that was gone by then ended the request: what came after it in the list trained on, as nobody's."""
    site.policy(scheduler="ssh")
    name = "crossfed-heron-alpha"
    gone, goes_on = (subprocess.Popen(["sleep", "60"], env=os.environ | {queue.MARK: name}) for _ in range(2))
    try:
        gone.kill()
        gone.wait()
        monkeypatch.setattr(queue, "processes", lambda _: [gone.pid, goes_on.pid])
        assert site.ask(f"crossfed-gate cancel {name}")[0] == 0
        assert goes_on.wait(timeout=10) == -signal.SIGTERM
    finally:
        goes_on.kill()


def test_a_run_begins_with_a_listed_model_and_goes_on(site: Gate):
    request = site.round()
    from facility.exchange.messages.manifest import read_manifest

    site.policy(models=[read_manifest(site.workdir / "in/model").content_sha256], node_hours_per_day=100.0)
    assert site.ask(request)[0] == 0
    request = site.round(1)
    (site.workdir / "in/model/model.safetensors").write_bytes(b"after a round")
    write_manifest(site.workdir / "in/model", Manifest(kind="model", federation="heron", round=1))
    with_run(site.workdir / "in/model", "a" * 32)
    site.sign()
    assert site.ask(request)[0] == 0, "the model of a later round follows from the first"
    with_run(site.workdir / "in/model", "b" * 32)
    site.sign()
    assert site.ask(request)[0] == 77, "another run has to begin with a listed model"


def test_a_classifiers_head_is_trained_beside_adapters_where_a_policy_allows_those_alone(site: Gate):
    site.policy(adapters_only=True, node_hours_per_day=100.0)
    for more in ({}, {"modules_to_save": ["score", "classifier"]}):
        assert site.ask(site.round(lora={"rank": 4} | more))[0] == 0


NAMED = {
    "base": lambda path: {"lora": {"rank": 4, "base": str(path)}},
    "reference": lambda path: {"preference": {"reference": str(path)}},
}


@pytest.mark.parametrize("key", NAMED)
def test_a_base_model_that_the_coordinator_could_write_is_none_of_the_listed(
    site: Gate, monkeypatch: pytest.MonkeyPatch, key: str
):
    """Whatever a manifest beside it says: by the bytes of its weights, which are hashed once."""
    from safetensors.numpy import save_file

    from facility.exchange.checkpoints.base_model import base_digest
    from facility.exchange.messages.manifest import read_manifest

    monkeypatch.setenv("XDG_CACHE_HOME", str(site.home / "cache"))
    site.round()
    model, bases = site.workdir / "in/model", {"inside": site.workdir / "base", "outside": site.home / "base"}
    for base in bases.values():
        base.mkdir()
        save_file({"w": np.arange(4, dtype=np.float32)}, base / "model.safetensors")
        write_manifest(base, Manifest(kind="model", federation="heron", round=0))
    (site.home / "link").symlink_to(bases["inside"])
    listed = [read_manifest(model).content_sha256, base_digest(bases["outside"])]
    site.policy(models=listed, node_hours_per_day=100.0)
    for base in (bases["inside"], site.home / "link"):
        code, _, said = site.ask(site.round(**NAMED[key](base)))
        assert code == 77 and "lies in the workdir, where the coordinator writes" in said, said
    assert site.ask(site.round(**NAMED[key](bases["outside"])))[0] == 0
    save_file({"w": np.ones(4, np.float32)}, bases["outside"] / "model.safetensors")
    code, _, said = site.ask(site.round(**NAMED[key](bases["outside"])))
    assert code == 77 and "not among the policy's models" in said, said
    (bases["outside"] / "model.safetensors").write_bytes(b"no tensors")
    code, _, said = site.ask(site.round(**NAMED[key](bases["outside"])))
    assert code == 77 and "is none" in said, said


BAD_POLICIES = {
    "facility: [": (2, "expected"),
    "- a": (1, "no mapping"),
    "facility: alpha\nfacilty: b": (2, "unknown key 'facilty'"),
    "facility: 7": (1, "expected a facility's name"),
    "facility: alpha\nhours: soon": (2, "expected a number"),
    "facility: alpha\nhours: .inf": (2, "expected a number"),
    "facility: alpha\nhours: 0": (2, "expected a number of hours, a second"),  # of no limit, and of no node-hours
    "facility: alpha\nhours: 0.0001": (2, "expected a number of hours, a second"),
    "facility: alpha\nkeys:\n  - SHA256:short": (3, "fingerprints"),
    "facility: alpha\nworkdir: ../x": (2, "absolute path"),
    "facility: alpha\nencodings: [../zip]": (2, "codecs' names"),
    "facility: alpha\nadapters_only: maybe": (2, "true or false"),
    "facility: alpha\nfacility: beta": (2, "twice"),
    "facility: alpha": (2, "lacks federations, keys"),
    "facility: alpha\nfill: " + "[" * 3000: (2, "nested too deeply"),
    "facility: alpha\nfill:\n  " + "- " * 3000: (3, "nested too deeply"),
    "facility: alpha\n? [fill, hours]\n: 1": (2, "a key is a list or a mapping"),
}


@pytest.mark.parametrize("text", BAD_POLICIES, ids=lambda text: text[:60])
def test_a_policy_that_is_not_sound_closes_the_gate_and_names_the_line(tmp_path: Path, text: str, capsys, monkeypatch):
    line, words = BAD_POLICIES[text]
    file = tmp_path / "policy.yml"
    file.write_text(text + "\n")
    with pytest.raises(ConfigurationError, match=words) as caught:
        read_policy(file)
    assert caught.value.line == line
    monkeypatch.setenv("SSH_ORIGINAL_COMMAND", "crossfed-gate nothing")
    assert gate.main(["--policy", str(file), "--key", KEY]) == 2
    assert "the gate is closed" in capsys.readouterr().err


def test_a_policy_that_a_coordinator_could_replace_is_refused(site: Gate):
    site.policy(workdir=str(site.home))
    with pytest.raises(ConfigurationError, match="lies in the workdir|holds this policy"):
        read_policy(site.home / "policy.yml")


def test_the_example_policy_is_sound():
    example = read_policy(Path(gate.__file__).with_name("policy-example.yml"))
    assert example.facility == "alpha"


def test_the_gate_starts_without_what_takes_time_to_import():
    code = (
        "import facility.gate, sys; sys.exit(bool({'torch', 'numpy', 'pydantic', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_answer_that_nobody_waits_for_any_more_is_no_failure(tmp_path: Path, monkeypatch, capfdbinary):
    """A look at a job's progress ends with the job, and its connection with it."""
    made = Gate(tmp_path, monkeypatch, capfdbinary)
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "facility.gate", "--policy", str(made.home / "policy.yml"), "--key", KEY]
    environment = os.environ | {"SSH_ORIGINAL_COMMAND": "crossfed-gate hold"}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=write, stderr=subprocess.PIPE, env=environment)
    os.close(write)
    entries = [json.loads(line) for line in (made.home / "gate" / "audit.jsonl").read_text().splitlines()]
    assert (done.returncode, done.stderr) == (2, b"") and [one["what"] for one in entries] == ["request", "broken off"]


def test_a_gate_whose_coordinator_still_holds_the_connection_ends_with_its_jobs_code(site: Gate):
    """A process of its own, as sshd starts it: a thread that waits for the end of the input is no reason to abort."""
    (site.home / "site.sh").write_text("#!/bin/bash\nexit 3\n{{ streamflow_command }}\n")
    request = site.round().replace("crossfed-gate submit", "crossfed-gate run")
    site.policy(scheduler="ssh", fill={})
    words = [sys.executable, "-m", "facility.gate", "--policy", str(site.home / "policy.yml"), "--key", KEY]
    environment = os.environ | {"SSH_ORIGINAL_COMMAND": request, "PYTHONPATH": str(ROOT)}
    gate = subprocess.Popen(
        words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert gate.stdin is not None and gate.stderr is not None
    try:
        assert gate.wait(60) == 3, gate.stderr.read()
    finally:
        gate.stdin.close()
        gate.kill()
