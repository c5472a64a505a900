"""`crossfed check`: each of many mistakes is told by a sentence of its own, with a fix, and nothing is submitted.

The facility is a directory on this machine; `ssh`, `sbatch`, `qstat` and `flux` are stand-ins on the PATH that speak as
the real ones do. What they run is real: the probe, the dataset, the file system.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config.deployments import Deployment
from coordinator.config.federation import Facility, Federation, read_federation
from coordinator.memory.figures import ModelFigures
from coordinator.memory.need import needed_bytes, parts_of, smallest_ranks
from coordinator.preflight import check as checking
from coordinator.preflight import remote
from coordinator.preflight.check import check
from coordinator.preflight.coordinator import failing_here
from coordinator.preflight.cost import check_memory, link_speed
from coordinator.preflight.fitting import check_fitting
from coordinator.preflight.probe_answer import DatasetAnswer
from coordinator.preflight.remote import ssh_command
from coordinator.preflight.row import Row
from coordinator.preflight.scheduler import flux_refusal, wanted_hours, wanted_nodes
from facility.exchange.checkpoints.tokenizer import tokenizer_digest
from facility.exchange.errors import ConfigurationError
from facility.exchange.memory.rank import RankLayout
from facility.exchange.messages.layout import LayoutSettings, LoraSettings
from facility.exchange.messages.plan import plan_from_json, write_plan
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.validation import parse_dataclass
from facility.training.lora import inject_adapters
from facility.training.parallel.arrange import layout_of_plan, layout_of_settings, remapped_rank
from facility.training.processes.ranks import Ranks
from tests.forked_trainers import SOCKET, variables
from tests.pico import save_pico
from tests.preparing.corpora import save_bert_tokenizer
from tests.schedulers.recordings import recorded
from tests.training.federation import write_dataset

ROOT = Path(__file__).resolve().parents[2]

SSH = """#!/bin/bash
printf '%s\\n' "$@" >> "$SITE/ssh-arguments"
if [ -s "$SITE/ssh-says" ]; then cat "$SITE/ssh-says" >&2; exit 255; fi
while [ "$1" != -- ]; do shift; done
shift 2
cd "$SITE/home"
exec env HOME="$SITE/home" bash -c "$*"
"""
SBATCH = """#!/bin/bash
echo "$*" > "$SITE/sbatch-arguments"
[[ "$*" == *--test-only* ]] || { echo submitted >> "$SITE/submitted"; exit 1; }
cat > "$SITE/job"
if [ -s "$SITE/sbatch-says" ]; then cat "$SITE/sbatch-says" >&2; exit 1; fi
echo "sbatch: Job 42 to start at 2026-01-01T00:00:00 using 128 processors on nodes n1 in partition main" >&2
"""
SINFO = """#!/bin/bash
[ "$*" = "-h -p main -o %a %l" ] && cat "$SITE/sinfo-says"
"""
QSTAT = """#!/bin/bash
[ "$2" = work ] && { echo "Queue: work"; cat "$SITE/queue"; exit 0; }
echo "qstat: Unknown queue $2" >&2; exit 170
"""
FLUX = '#!/bin/bash\ncat "$SITE/flux-$1-$2"\n'

FEDERATION = """\
name: two
model: ../model
rounds: 2
training: {steps: 2, batch_sequences: 4}
facilities:
  - name: far
    dataset: DATA
    deployment:
      type: slurm
      host: login.example.org
      user: alice
      workdir: WORK
      template: TEMPLATE
      environment: {home: HOME}
      fill: {account: proj42, partition: main}
"""


@dataclass
class Site:
    """A facility and its coordinator in one directory."""

    root: Path

    @property
    def file(self) -> Path:
        return self.root / "workflow" / "federation.yml"

    def edit(self, old: str, new: str) -> None:
        text = self.file.read_text()
        assert old in text
        self.file.write_text(text.replace(old, new))

    def says(self, program: str, words: str) -> None:
        (self.root / "site" / f"{program}-says").write_text(words + "\n")

    def env(self, lines: str) -> None:
        with open(self.root / "site" / "crossfed" / "env.sh", "a") as file:
            file.write(lines + "\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    there = tmp_path / "site"
    (there / "home").mkdir(parents=True)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "ssh": SSH,
        "sbatch": SBATCH,
        "sinfo": SINFO,
        "qsub": "#!/bin/bash\n",
        "qstat": QSTAT,
        "flux": FLUX,
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (there / "home" / ".bash_profile").write_text(f"export PATH={programs}:$PATH\n")
    (there / "queue").write_text("    enabled = True\n    started = True\n")
    (there / "crossfed").mkdir()
    forked = " ".join(f"{name}={value}" for name, value in variables().items())
    (there / "crossfed" / "env.sh").write_text(f"export PATH={Path(sys.executable).parent}:$PATH {forked}\n")
    (there / "work").mkdir()
    write_dataset(there / "data")
    save_pico(tmp_path / "model")
    (tmp_path / "workflow").mkdir()
    text = (
        FEDERATION.replace("DATA", str(there / "data"))
        .replace("WORK", str(there / "work"))
        .replace("HOME", str(there / "crossfed"))
    )
    (tmp_path / "workflow" / "federation.yml").write_text(
        text.replace("TEMPLATE", str(ROOT / "templates" / "slurm.sh"))
    )
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SITE", str(there))
    return Site(root=tmp_path)


def failing(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.verdict == "fail"]


def test_a_sound_federation_passes_and_submits_nothing(site: Site):
    """Its probe is a Python of its own; those of other laws are forks, which have imported what it does."""
    site.env(f"unset {SOCKET}")
    rows = check(site.file)
    assert failing(rows) == [], failing(rows)
    told = {row.check: row.found for row in rows if row.subject == "far"}
    assert (
        "in partition main" in told["job accepted"]
        and "at most 6 (2 rounds and the final evaluation of 1 node with 4 GPUs, 2 h each)" in told["node-hours"]
        and "more where jobs run out of time and come back" in told["node-hours"]
    )
    assert "a round: about" in told["link"] and "40 training and 10 validation blocks of 16 tokens" in told["dataset"]
    assert not (site.root / "site" / "submitted").exists()
    job = (site.root / "site" / "job").read_text()
    assert job.startswith("#!/bin/bash\n") and "#SBATCH --account=proj42\n" in job and "streamflow" not in job
    assert (site.root / "site" / "sbatch-arguments").read_text() == "--test-only\n"
    spoken = (site.root / "site" / "ssh-arguments").read_text()
    assert "BatchMode=yes" in spoken and "StrictHostKeyChecking=yes" in spoken


@pytest.mark.parametrize(("state", "verdict"), [("up", "ok"), ("down", "warning"), ("up\ndown", "warning")])
def test_a_partition_that_takes_jobs_and_starts_none_is_told(site: Site, state: str, verdict: str):
    """sbatch --test-only names a time of start for it; it refuses for one that is drained or inactive."""
    site.says("sinfo", "\n".join(f"{one} infinite" for one in state.split()))
    (row,) = [row for row in check(site.file) if row.check == "job accepted"]
    assert row.verdict == verdict and ("partition main is down" in row.found) == (verdict == "warning"), row


@pytest.mark.parametrize(
    ("limit", "qos", "verdict"),
    [
        ("infinite", "", "ok"),
        pytest.param("n/a", "", "ok", marks=pytest.mark.slow),
        ("2:00:00", "", "ok"),
        pytest.param("1-00:00:00", "", "ok", marks=pytest.mark.slow),
        ("1:59:59", "", "fail"),
        pytest.param("30:00", "", "fail", marks=pytest.mark.slow),
        ("30:00", "long", "warning"),
    ],
)
def test_more_time_than_the_partition_gives_is_told_though_sbatch_takes_the_job(
    site: Site, limit: str, qos: str, verdict: str
):
    """Without EnforcePartLimits, sbatch --test-only names a time of start for a job that Slurm will never start."""
    site.says("sinfo", f"up {limit}")
    if qos:
        site.edit("      fill:", f"      options: {{qos: {qos}}}\n      fill:")
    (row,) = [row for row in check(site.file) if row.check == "job accepted"]
    assert row.verdict == verdict, row
    if verdict != "ok":
        assert "asks for 2 h" in row.found and "sinfo -o '%P %l'" in row.fix, row


def test_a_tied_head_to_save_is_told_before_a_job_in_the_words_of_the_job(site: Site):
    """The embedding's own name is taken, and so is the head of a model that is not tied."""
    base = "steps: 2, batch_sequences: 4"
    site.edit(base, base + ", lora: {rank: 2, modules_to_save: [lm_head]}")
    federation = read_federation(site.file)
    assert failing_here(federation) == []
    shutil.rmtree(site.root / "model")
    save_pico(site.root / "model", tie_word_embeddings=True)
    (row,) = failing_here(federation)
    assert (row.subject, row.check) == ("far", "adapters")
    tied = AutoModelForCausalLM.from_pretrained(site.root / "model")
    with pytest.raises(ConfigurationError) as refused:
        inject_adapters(tied, federation.facilities[0].training.lora, classifies=False)
    assert row.found == str(refused.value) and "name 'embed_tokens' instead" in row.found
    assert row in check_fitting(federation)
    site.edit("[lm_head]", "[embed_tokens]")
    assert failing_here(read_federation(site.file)) == []


Mistake = tuple[str, Callable[[Site], object], str, str]


def damage(path: str, content: bytes | None = None) -> Callable[[Site], object]:
    def do(site: Site) -> None:
        target = site.root / path
        if content is None:
            target.unlink()
        else:
            target.write_bytes(content)

    return do


def dataset(**changes) -> Callable[[Site], object]:
    def do(site: Site) -> None:
        path = site.root / "site/data/dataset.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return do


def foreign_tokenizer(site: Site) -> None:
    """The model carries one tokenizer; the dataset was made with another of the same size."""
    save_bert_tokenizer(site.root / "other")
    shutil.copy(site.root / "other/tokenizer.json", site.root / "model")
    text = (site.root / "other/tokenizer.json").read_text()
    (site.root / "other/tokenizer.json").write_text(text.replace('"mare"', '"mere"'))
    dataset(tokenizer_sha256=tokenizer_digest(site.root / "other"))(site)


def edit(old: str, new: str) -> Callable[[Site], object]:
    return lambda site: site.edit(old, new)


def says(program: str, words: str) -> Callable[[Site], object]:
    return lambda site: site.says(program, words)


def public_key(site: Site) -> None:
    key = site.root / "key"
    key.write_text("secret")
    key.chmod(0o644)
    site.edit("user: alice", f"user: alice\n      key: {key}")


def other_scheduler(kind: str, fill: str) -> Callable[[Site], object]:
    def do(site: Site) -> None:
        site.edit("type: slurm", f"type: {kind}")
        site.edit("slurm.sh", f"{kind}.sh")
        site.edit("fill: {account: proj42, partition: main}", f"fill: {fill}")

    return do


def closed_queue(site: Site) -> None:
    other_scheduler("pbs", "{account: a, queue: work}")(site)
    (site.root / "site/queue").write_text("    enabled = True\n    started = False\n")


def refused_flux(site: Site) -> None:
    other_scheduler("flux", "{bank: a, queue: work}")(site)
    for name in ("flux-queue-list", "flux-queue-status", "flux-resource-list"):
        (site.root / "site" / name).write_text(recorded(name).out)


def without_programs(site: Site) -> None:
    (site.root / "site/home/.bash_profile").write_text("export PATH=/nowhere\n")


def old_python(site: Site) -> None:
    program = site.root / "site" / "old" / "python3"
    program.parent.mkdir()
    program.write_text('#!/bin/bash\n[ "$1" = --version ] && echo Python 3.9.1\nexit 1\n')
    program.chmod(0o755)
    site.env(f"export PATH={program.parent}:$PATH")


def other_formats(site: Site) -> None:
    """A facility whose CrossFed is another release."""
    package = site.root / "site" / "older"
    package.mkdir()
    (package / "facility").mkdir()
    for path in (ROOT / "facility").iterdir():
        if path.name != "exchange" and path.name != "__pycache__":
            (package / "facility" / path.name).symlink_to(path)
    shutil.copytree(ROOT / "facility" / "exchange", package / "facility" / "exchange")
    report = package / "facility" / "exchange" / "messages" / "report.py"
    report.write_text(re.sub(r"^FORMAT = \d+", "FORMAT = 99", report.read_text(), flags=re.MULTILINE))
    site.env(f"export PYTHONPATH={package}")


def no_crossfed(site: Site) -> None:
    """An environment in which the package cannot be imported, even where it is installed for the tests themselves."""
    nothing = site.root / "site" / "nothing"
    nothing.mkdir()
    (nothing / "facility.py").write_text("raise ModuleNotFoundError(\"No module named 'facility'\")\\n")
    site.env(f"export PYTHONPATH={nothing}; cd /")


def missing_package(site: Site, package: str = "transformers", version: str = "") -> None:
    """A package without its metadata is not installed. `version`: it is, in this one."""
    trick = site.root / "site" / "trick"
    trick.mkdir()
    (trick / "sitecustomize.py").write_text(
        "import importlib.metadata as m\nold = m.version\n"
        f"def version(name):\n    if name == '{package}':\n        if '{version}': return '{version}'\n"
        "        raise m.PackageNotFoundError(name)\n    return old(name)\nm.version = version\n"
    )
    site.env(f"unset {SOCKET}; export PYTHONPATH={ROOT}:{trick}")


def quantised_without_the_package(site: Site, version: str = "") -> None:
    missing_package(site, "bitsandbytes", version)
    save_pico(site.root / "model", hidden_size=64, intermediate_size=128)  # a base that 4 bits can hold
    site.edit("batch_sequences: 4", "batch_sequences: 4, lora: {rank: 2, quantize_base: nf4}")


def small_model(site: Site) -> None:
    path = site.root / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 8}))


CHANGED = "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nHost key verification failed."
REVOKED = "@       WARNING: REVOKED HOST KEY DETECTED!               @\nHost key verification failed."
MISTAKES: list[Mistake] = [
    ("yaml", edit("rounds: 2", "rounds: [2"), "federation.yml", r"federation\.yml:\d+: not valid YAML"),
    (
        "unknown key",
        edit("rounds: 2", "rouds: 2\nrounds: 2"),
        "federation.yml",
        r"federation\.yml:3: unknown key 'rouds'; did you mean 'rounds'",
    ),
    (
        "no rounds",
        edit("rounds: 2", "rounds: 0"),
        "federation.yml",
        r"federation\.yml:3: rounds is 0, expected 1 or more",
    ),
    ("unfilled", edit(", partition: main", ""), "federation.yml", r"placeholders that nothing fills: <partition>"),
    ("no template", edit("slurm.sh", "slrum.sh"), "federation.yml", r"federation\.yml:\d+: .*cannot be read"),
    ("no model", edit("../model", "../modle"), "model", "holds no config.json"),
    ("damaged model", damage("model/model.safetensors", b"x" * 40), "model", "the model is damaged: .*safetensors"),
    ("damaged config", damage("model/config.json", b"{"), "model", "config.json cannot be read"),
    ("no key", edit("user: alice", "user: alice\n      key: /nowhere/key"), "key", "/nowhere/key does not exist"),
    ("public key file", public_key, "key", "can be read by others"),
    (
        "unknown host key",
        says(
            "ssh",
            "No ED25519 host key is known for login.example.org and you have requested strict checking.\n"
            "Host key verification failed.",
        ),
        "host key",
        "is not in known_hosts",
    ),
    ("revoked host key", says("ssh", REVOKED), "host key", "marks as revoked"),
    ("changed host key", says("ssh", CHANGED), "host key", "shows another host key than known_hosts has"),
    (
        "name",
        says("ssh", "ssh: Could not resolve hostname login.example.org: Name or service not known"),
        "connection",
        "does not resolve",
    ),
    (
        "refused",
        says("ssh", "ssh: connect to host login.example.org port 22: Connection refused"),
        "connection",
        "nothing listens at",
    ),
    (
        "silent host",
        says("ssh", "ssh: connect to host login.example.org port 22: Connection timed out"),
        "connection",
        "does not answer",
    ),
    (
        "no route",
        says("ssh", "ssh: connect to host login.example.org port 22: No route to host"),
        "connection",
        "no route to",
    ),
    (
        "login",
        says("ssh", "alice@login.example.org: Permission denied (publickey)."),
        "login",
        "does not accept our key for alice",
    ),
    (
        "too many keys",
        says("ssh", "Received disconnect: Too many authentication failures"),
        "login",
        "gave up before our key was tried",
    ),
    ("no env.sh", damage("site/crossfed/env.sh"), "environment", "env.sh does not exist at the facility"),
    ("old python", old_python, "environment", "Python 3.9.1 is too old"),
    ("no crossfed", no_crossfed, "environment", "CrossFed cannot be imported"),
    ("formats", other_formats, "message format", "speaks another message format: report 99 there, 1 here"),
    ("package", missing_package, "packages", "lacks transformers"),
    ("4 bits", quantised_without_the_package, "bitsandbytes", "quantize_base is nf4, and the facility has no bits"),
    (
        "old 4 bits",
        lambda site: quantised_without_the_package(site, "0.49.2"),
        "bitsandbytes",
        r"the facility has bitsandbytes 0\.49\.2, expected bitsandbytes>=0\.",
    ),
    ("no dataset", edit("site/data", "site/dta"), "dataset", "does not exist at the facility"),
    ("unprepared dataset", damage("site/data/dataset.json"), "dataset", "the dataset is not usable"),
    ("other tokenizer", dataset(vocabulary_size=5000), "tokenizer", "tokenised with 5000 tokens, the model has 128"),
    (
        "foreign tokenizer",
        foreign_tokenizer,
        "tokenizer",
        r"tokenised with tokenizer\.json:\w+, the model carries tokenizer\.json:\w+",
    ),
    ("damaged tokenizer", damage("model/tokenizer.json", b"{}"), "model", "tokenizer.json is not a tokenizer"),
    ("long blocks", small_model, "dataset", "blocks have 16 tokens, the model takes at most 8"),
    (
        "little data",
        edit("batch_sequences: 4", "batch_sequences: 400"),
        "dataset",
        "40 training blocks are fewer than one batch of 400",
    ),
    ("no sbatch", without_programs, "scheduler", "there is no sbatch command"),
    (
        "partition",
        says(
            "sbatch",
            "sbatch: error: invalid partition specified: main\nallocation failure: Invalid partition name specified",
        ),
        "job accepted",
        "not one of this cluster's",
    ),
    (
        "account",
        says("sbatch", "allocation failure: Invalid account or account/partition combination specified"),
        "job accepted",
        "account may not use this partition",
    ),
    ("qos", says("sbatch", "allocation failure: Invalid qos specification"), "job accepted", "QoS is not one"),
    (
        "time",
        says("sbatch", "allocation failure: Requested time limit is invalid (missing or exceeds some limit)"),
        "job accepted",
        "more than the partition allows",
    ),
    (
        "account's limits",
        says(
            "sbatch",
            "allocation failure: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
        ),
        "job accepted",
        "a limit of the account or its QoS",
    ),
    (
        "nodes",
        says("sbatch", "allocation failure: Requested node configuration is not available"),
        "job accepted",
        "no node of the partition that is up has",
    ),
    (
        "controller",
        says("sbatch", "allocation failure: Unable to contact slurm controller (connect failure)"),
        "job accepted",
        "controller does not answer",
    ),
    (
        "option",
        says("sbatch", "sbatch: unrecognized option '--tme'\nsbatch: Try sbatch --help for more information"),
        "job accepted",
        "does not know an option .*'--tme'",
    ),
    ("pbs queue", other_scheduler("pbs", "{account: a, queue: wrok}"), "job accepted", "there is no PBS queue 'wrok'"),
    ("pbs closed", closed_queue, "job accepted", "is not started"),
    ("flux", refused_flux, "job accepted", "there is no Flux queue 'work'"),
    ("workdir", edit("site/work", "site/data/dataset.json/x"), "room", "cannot be written to"),
    ("memory", edit("user: alice", "user: alice\n      gpu_memory_gb: 0.0001"), "memory", "are needed on each GPU"),
]


@pytest.mark.parametrize(("seed", "where", "sentence"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_told(site: Site, seed: Callable[[Site], object], where: str, sentence: str):
    seed(site)
    rows = failing(check(site.file, link=False))
    told = [row for row in rows if row.check == where and re.search(sentence, row.found)]
    assert len(told) == 1, rows
    assert told[0].fix and len(rows) == 1, rows
    assert not (site.root / "site" / "submitted").exists()


@pytest.mark.parametrize(
    ("package", "version", "told"),
    [("peft", "0.18.1", r"peft 0\.18\.1, expected >="), ("pillow", "", "pillow is not installed")],
)
def test_packages_of_a_site_that_are_not_as_asked_for_are_told(site: Site, package: str, version: str, told: str):
    """Of an environment that the site provides; what a job does not need may be so."""
    missing_package(site, package, version)
    (row,) = [row for row in check(site.file, link=False) if row.check == "packages"]
    assert row.verdict == "warning" and re.search(told, row.found) and row.found.count("expected") <= 1, row


def test_each_mistake_has_its_own_sentence():
    sentences = [mistake[3] for mistake in MISTAKES]
    assert len(set(sentences)) == len(sentences) >= 20


def test_too_little_room(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("coordinator.preflight.disk.MASTER_BYTES", 10**15)
    rows = {row.subject: row for row in failing(check(site.file, link=False))}
    assert re.search(r"are free at .*, the rounds need [0-9.]+ [TPE]B \(models", rows["far"].found)
    assert "the run needs up to" in rows["coordinator"].found


@pytest.mark.parametrize("name", ["archive", "workdir"])
def test_a_folder_of_the_coordinator_that_takes_no_file_fails(site: Site, monkeypatch: pytest.MonkeyPatch, name: str):
    """Both are asked, on one file system too."""
    folder, allowed = site.root / f"closed-{name}", os.access
    folder.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode, **more: path != folder and allowed(path, mode, **more))
    site.file.write_text(site.file.read_text() + f"{name}: {folder}\n")
    (row,) = failing(check(site.file, link=False))
    assert (row.subject, row.check) == ("coordinator", "room")
    assert f"{folder} cannot be written to" in row.found


def test_a_folder_that_files_cannot_be_rendered_in_fails(site: Site, monkeypatch: pytest.MonkeyPatch):
    folder, allowed = site.file.parent, os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **more: path != folder and allowed(path, mode, **more))
    (row,) = failing(check(site.file, link=False))
    assert (row.subject, row.check) == ("coordinator", "rendered files")
    assert f"{folder} cannot be written to" in row.found


def test_a_quota_smaller_than_the_disk_is_noticed(site: Site):
    program = site.root / "site" / "quota" / "fallocate"
    program.parent.mkdir()
    program.write_text("#!/bin/bash\necho 'fallocate: fallocate failed: Disk quota exceeded' >&2; exit 1\n")
    program.chmod(0o755)
    site.env(f"export PATH={program.parent}:$PATH")
    (row,) = failing(check(site.file, link=False))
    assert "could not be reserved" in row.found and "Disk quota exceeded" in row.found
    assert list((site.root / "site" / "work").iterdir()) == []


def test_the_command_prints_a_table_or_json_and_its_code_says_it(site: Site, monkeypatch: pytest.MonkeyPatch):
    site.says("sbatch", "allocation failure: Invalid account or account/partition combination specified")
    rows = check(site.file, link=False)
    asked: list[tuple[Path, bool, bool]] = []

    def answer_late(federation: Federation, *, link: bool, submit: bool, progress: Callable[[str], None]) -> list[Row]:
        progress("waiting for leonardo")
        asked.append((federation.file, link, submit))
        return rows

    monkeypatch.setattr(checking, "_check", answer_late)
    command = ["check", "--no-link", "-f", str(site.file)]
    table = CliRunner().invoke(app, command)
    assert table.exit_code == 1 and "sacctmgr show assoc" in table.stdout and "1 to fix" in table.stdout
    assert table.stderr == "waiting for leonardo\n" and "waiting" not in table.stdout
    told = CliRunner().invoke(app, [*command, "--json"])
    answer = json.loads(told.stdout)
    assert told.exit_code == 1 and answer["failing"] == 1
    assert {"subject", "check", "verdict", "found", "fix"} == set(answer["rows"][0])
    assert asked == [(site.file, False, False)] * 2
    assert checking.show_rows([], as_json=True, write=lambda _: None) == 0


def test_no_line_is_spoken_of_where_there_is_no_file(tmp_path: Path):
    (row,) = check(tmp_path / "federation.yml")
    assert "no such file" in row.found and row.fix == "fix that file"
    (tmp_path / "federation.yml").write_text("nmae: f\n")
    assert check(tmp_path / "federation.yml")[0].fix == "fix that line"


def test_ssh_holds_the_jump_host_to_the_same_rules():
    raw = {
        "type": "ssh",
        "host": "a:2222",
        "user": "u",
        "key": "/k",
        "workdir": "/w",
        "tunnel": {"host": "j", "user": "v"},
        "known_hosts": "/kh",
    }
    words = ssh_command(parse_dataclass(Deployment, raw, where="d"))
    proxy = next(word for word in words if word.startswith("ProxyCommand="))
    assert proxy.count("StrictHostKeyChecking=yes") == 1 and words.count("StrictHostKeyChecking=yes") == 1
    assert "UserKnownHostsFile=/kh" in words and words[-5:] == ["2222", "-l", "u", "--", "a"]
    assert "UserKnownHostsFile=/kh" in proxy


def test_a_login_by_another_key_than_the_named_one_is_no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    key = tmp_path / "id_site"
    key.touch(mode=0o600)
    deployment = parse_dataclass(Deployment, {"type": "ssh", "host": "a", "workdir": "/w", "key": str(key)}, where="d")
    for used, verdict in ((key, "ok"), (tmp_path / "id_other", "fail")):
        said = f"debug1: Server accepts key: {used} ED25519 SHA256:x\n"
        monkeypatch.setattr(
            remote, "run_there", lambda *_, said=said, **__: remote.Answer(code=0, out="crossfed-reached\n", error=said)
        )
        row = remote.check_connection("site", deployment)
        assert row.verdict == verdict, row
    assert "id_other" in row.found and str(key) in row.found


def test_ssh_reads_the_files_that_the_engine_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / ".ssh").mkdir()
    for name in ("config", "id_ed25519", "id_ed25519.pub"):
        (tmp_path / ".ssh" / name).touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ssh_command(parse_dataclass(Deployment, {"type": "ssh", "host": "a", "workdir": "/w"}, where="d"))
    place = str(tmp_path / ".ssh")
    assert words[words.index("-F") + 1] == f"{place}/config" and f"UserKnownHostsFile={place}/known_hosts" in words
    assert [words[n + 1] for n, word in enumerate(words) if word == "-i"] == [f"{place}/id_ed25519"]


def test_options_are_tried_as_they_will_be_submitted(site: Site):
    options = '{ntasksPerNode: 1, nodes: "1", requeue: true, exclusive: false, memPerGpu: 8G, ignorePBS: true}'
    site.edit("      fill:", f"      options: {options}\n      fill:")
    assert failing(check(site.file)) == []
    told = (site.root / "site" / "sbatch-arguments").read_text().split()
    assert told == ["--test-only", "--ntasks-per-node=1", "--nodes=1", "--mem-per-gpu=8G", "--requeue", "--ignore-pbs"]


def test_without_a_final_evaluation_and_with_repeats_the_node_hours_are_of_the_rounds(site: Site):
    site.edit("rounds: 2\n", "rounds: 2\nfinal_evaluation: false\ncome_backs: 0\nretries: 1\n")
    told = next(row.found for row in check(site.file, link=False) if row.check == "node-hours")
    assert told == "at most 4 (2 rounds of 1 node with 4 GPUs, 2 h each); more where jobs fail and are repeated"
    site.edit("retries: 1\n", "retries: 0\nsubmit_ahead: {wait: 60}\n")
    told = next(row.found for row in check(site.file, link=False) if row.check == "node-hours")
    assert told.endswith("2 h each); more where jobs are submitted ahead and end without their model")


@pytest.mark.parametrize(
    ("options", "template", "nodes", "hours"),
    [
        ({}, "#SBATCH --nodes=4\n#SBATCH --gres=gpu:a100:8\n#SBATCH --time=1-12:30:00\n", (4, 8), 36.5),
        ({"nodes": "2-6", "time": "90", "gpusPerNode": "a100:4"}, "#SBATCH --nodes=4\n", (6, 4), 1.5),
        ({"gres": "gpu:a100:2"}, "#SBATCH --nodes=4\n#SBATCH --gres=gpu:a100:8\n", (4, 2), 0.0),
        ({"resources": {"select": "3:ngpus=2", "walltime": "02:00:00"}}, "#PBS -l select=1:ngpus=4\n", (3, 2), 2.0),
        ({"resources": {"walltime": "02:00:00"}}, "#PBS -l select=2:ngpus=4\n#PBS -l walltime=60\n", (2, 4), 2.0),
        ({}, "#PBS -l select=3:ncpus=32:ngpus=2\n#PBS -l walltime=02:15:00\n", (3, 2), 2.25),
        ({}, "#PBS -l select=2:ncpus=8:ngpus=1+4:ncpus=2+ncpus=1\n", (7, 1), 0.0),
        ({}, "#SBATCH -N 2-3 --exclusive\n", (3, 0), 0.0),
        ({}, "#flux: --nodes=5\n#flux: --time-limit=30m\n", (5, 0), 0.5),
        ({}, "#SBATCH -N 1 -t 90\n", (1, 0), 1.5),
        ({}, "#SBATCH --time=UNLIMITED\n", (1, 0), 0.0),
        ({}, "#PBS -l select=1\n#PBS -l walltime=5400,mem=4gb\n", (1, 0), 1.5),
        ({}, "#PBS -t 1-10\n#PBS -l select=1\n", (1, 0), 0.0),
        ({}, "#$ -l h_rt=1800\n", (1, 0), 0.5),
        ({}, "echo --nodes=9\n", (1, 0), 0.0),
        # as Slurm 22.05 reads them (`scontrol show job`)
        ({}, '#SBATCH --time="1:00:00" --nodes=\'2\' --gres="gpu:4"\n', (2, 4), 1.0),
        ({}, "#SBATCH --time=00:30:00 # half an hour, not --time=9\n", (1, 0), 0.5),
        ({}, "#SBATCH --time=60\n#SBATCH --time=120\n", (1, 0), 2.0),
        ({}, '#SBATCH --time=120 --comment="--time=3 --nodes=9"\n', (1, 0), 2.0),
        ({}, "#!/bin/bash\n# a\n\n#SBATCH -t90 -N2\nmodule load gcc\n#SBATCH --time=5 --gpus=8\n", (2, 0), 1.5),
        ({}, "  #SBATCH --time=34\n##SBATCH --nodes=3\n", (1, 0), 0.0),
        ({}, "{# --nodes=4 -#}\n#SBATCH\t--nodes=3\n", (3, 0), 0.0),
        # GPUs of a node, in all ways to ask for them
        ({}, "#SBATCH --gres=gpu:a100-sxm:4\n", (1, 4), 0.0),
        ({}, "#SBATCH --gres=nvme:1,gpu:nvidia_a100-sxm4-80gb:2(S:0-1)\n", (1, 2), 0.0),
        ({}, "#SBATCH --gres=gpu\n", (1, 1), 0.0),
        ({}, "#SBATCH --gres=gpumem:80G\n", (1, 0), 0.0),
        ({}, "#SBATCH --gpus-per-node=h100-sxm:3,v100:1\n", (1, 4), 0.0),
        ({}, "#SBATCH --gpus=8\n#SBATCH --nodes=2\n", (2, 4), 0.0),
        ({}, "#SBATCH -N 3 -G 8\n", (3, 3), 0.0),
        ({}, "#SBATCH -Ga100:2\n", (1, 2), 0.0),
        ({}, "#SBATCH --nodes=2 --ntasks-per-node=4 --gpus-per-task=a100:1\n", (2, 4), 0.0),
        ({}, "#SBATCH --nodes=2 -n 8 --gpus-per-task=1\n", (2, 4), 0.0),
        ({"gpus": "a100-sxm:8", "nodes": "2"}, "#SBATCH --gpus=1\n", (2, 4), 0.0),
        ({"gpusPerTask": "1", "ntasksPerNode": 4}, "", (1, 4), 0.0),
        ({}, "#PBS -l select=1:ncpus=4+2:ncpus=8:ngpus=4\n", (3, 4), 0.0),
        ({}, '#PBS -l nodes=2:ppn=8,walltime="01:00:00" -l ngpus=4\n', (2, 4), 1.0),
        ({}, "#flux: -N 2 -n 8 -g 1 -t 2h\n", (2, 4), 2.0),
        ({}, "#flux: -N2 -g4\n", (2, 4), 0.0),
        ({}, "#flux: --nodes=2 --gpus-per-node=4 --queue=-g9\n", (2, 4), 0.0),
        ({}, "#$ -l h_rt=01:00:00,gpu=2\n", (1, 2), 1.0),
    ],
)
def test_what_a_job_asks_for(options: dict, template: str, nodes: tuple[int, int], hours: float):
    kind = "pbs" if "resources" in options else "slurm" if options else "local"
    deployment = Deployment(type=kind, template="t", options=options) if options else Deployment(type=kind)
    assert wanted_nodes(deployment, template) == nodes
    assert wanted_hours(deployment, template) == pytest.approx(hours)


@pytest.mark.parametrize(
    "login, transfer, speed, words",
    [
        (0.5, 2.5, 8e6, "8 MB/s (one stream)"),
        (20.0, 36.0, 1e6, "1 MB/s (one stream)"),
        (20.0, 20.1, 8e6, "at least 8 MB/s (one stream; a login takes 20.0 s, which hides more)"),
        (20.0, 19.0, 8e6, "at least 8 MB/s"),
    ],
)
def test_a_slow_login_is_not_taken_for_a_fast_link(login: float, transfer: float, speed: float, words: str):
    """The difference of two logins of 20 s says nothing of 16 MB: a lower bound is told, not what the clock left."""
    found, told, _ = link_speed(login, transfer)
    assert found == pytest.approx(speed) and words in told


def test_bytes_on_the_link_by_hand():
    model = ModelFigures(parameters=1024, bytes=2048, vocabulary=50, positions=0, hidden=8, layers=2, heads=2)
    travelling = [model.travelling(2048, encoding, 0.25) for encoding in ("full", "delta-int8", "delta-int4", "sparse")]
    assert travelling == [2048, 1024 + 4 * 4, 512 + 16 * 2, 128 + 256 // 2]


def test_memory_by_hand():
    """1000 bf16 parameters: 4 master + 4 gradient + 8 moments + 2 copy bytes each; 2 sequences of 10 tokens.

    On two ranks FSDP2 casts what it gathers, here both blocks, so nothing is copied.
    """
    model = ModelFigures(parameters=1000, bytes=2000, vocabulary=50, positions=0, hidden=8, layers=2, heads=2)
    training = TrainingSettings(batch_sequences=2, compute_dtype="bfloat16")
    assert needed_bytes(model, training, 10, 1) == 18_000 + 2 * 10 * (34 * 8 * 2 + 10 * 50)
    assert needed_bytes(model, training, 10, 2) == 8_000 + 1000 * 2 + 10 * (34 * 8 * 2 + 10 * 50)
    assert smallest_ranks(model, training, 10, 30_000) == 2 and smallest_ranks(model, training, 10, 100) is None


def test_ranks_that_would_do_are_whole_nodes_and_no_more_nodes_do_where_each_holds_a_model():
    model = ModelFigures(parameters=8000, bytes=2000, vocabulary=50, positions=0, hidden=8, layers=2, heads=2)
    sharding = {name: TrainingSettings(layout=LayoutSettings(sharding=name)) for name in ("FULL_SHARD", "HYBRID_SHARD")}
    least = {
        (name, node): smallest_ranks(model, training, 1, 80_000, local_ranks=node)
        for name, training in sharding.items()
        for node in (0, 2, 4)
    }
    assert least["FULL_SHARD", 0] == 3 and least["FULL_SHARD", 2] == least["FULL_SHARD", 4] + 1 == 4
    assert least["HYBRID_SHARD", 2] is None and least["HYBRID_SHARD", 4] == 3


def test_weights_that_are_offloaded_need_no_room_on_a_gpu():
    model = ModelFigures(parameters=8000, bytes=2000, vocabulary=50, positions=0, hidden=8, layers=2, heads=2)
    away = TrainingSettings(layout=LayoutSettings(offload=True))
    whole = needed_bytes(model, away, 1, 1)
    assert whole == needed_bytes(model, TrainingSettings(), 1, 1), "one rank shards nothing"
    assert needed_bytes(model, away, 1, 2, device="cpu") == needed_bytes(model, TrainingSettings(), 1, 2, device="cpu")
    assert needed_bytes(model, away, 1, 2) < needed_bytes(model, TrainingSettings(), 1, 2)


UP, EMBEDDING = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"
ONE_BLOCK = ModelFigures(
    parameters=9472,
    bytes=0,
    vocabulary=0,
    positions=0,
    hidden=0,
    layers=1,
    heads=1,
    shapes={UP: (64, 128), EMBEDDING: (10, 128)},
)
ADAPTERS = 2 * (64 + 128)


def state_of(model: ModelFigures, training: TrainingSettings) -> int:
    """Without what depends on tokens."""
    parts = parts_of(model, training, RankLayout(sequences=0, tokens=0))
    assert parts["activations"] == parts["logits"] == 0
    return sum(parts.values())


def test_memory_of_a_quantised_base_by_hand():
    """A matrix of 64 x 128 in a block takes half a byte a weight, and a scale of 32 bits for 64; the rest 4 bytes.

    It is once in float32 while it is multiplied.
    """
    lora = LoraSettings(rank=2, quantize_base="nf4", double_quantization=False)
    once = 4 * 64 * 128
    assert state_of(ONE_BLOCK, TrainingSettings(lora=lora)) == 4096 + 512 + 1280 * 4 + ADAPTERS * 16 + once
    double = dataclasses.replace(lora, double_quantization=True)
    assert state_of(ONE_BLOCK, TrainingSettings(lora=double)) == 4096 + 130 + 1280 * 4 + ADAPTERS * 16 + once


def test_memory_of_a_base_in_half_precision_by_hand():
    """The same matrix takes 2 bytes a weight where it is stored as it is computed with; else 4 and a copy of 2. An
    embedding is looked up and never copied."""
    training = TrainingSettings(lora=LoraSettings(rank=2), compute_dtype="bfloat16")
    stored = dataclasses.replace(ONE_BLOCK, dtypes={UP: "BF16", EMBEDDING: "BF16"})
    assert state_of(stored, training) == 8192 * 2 + 1280 * 4 + ADAPTERS * 18
    for dtypes in ({UP: "F16", EMBEDDING: "BF16"}, {}):
        other = dataclasses.replace(ONE_BLOCK, dtypes=dtypes)
        assert state_of(other, training) == 8192 * 6 + 1280 * 4 + ADAPTERS * 18


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"layout": {"stages": 3}}, "2 ranks cannot be arranged as 1 replicas x 3 stages"),
        ({"batch_sequences": 1}, "batch_sequences is 1, but 2 ranks read data"),
        ({"layout": {"virtual_stages": 2, "schedule": "interleaved_1f1b"}}, "needs layout.stages of 2 or more"),
        ({"layout": {"units": [[0, 2], [2, 6]]}}, "layout.units names stages, but layout.stages is 1"),
        ({"layout": {"stages": 2, "units": [[0, 2], [2, 5]]}}, "layout.units ends at 5, the model has 6 units"),
        ({"layout": {"stages": 2, "units": [[0, 3], [4, 6]]}}, "unit 3 is in no chunk"),
        ({"layout": {"stages": 2, "units": [[0, 6]]}}, "layout.units has 1 chunks, expected 2"),
        ({"layout": {"stages": 2, "units": [[0, 2], [2, 6]]}}, ""),
    ],
)
def test_a_layout_that_the_trainer_would_refuse_is_told_in_its_words(given: dict[str, Any], told: str):
    training = parse_dataclass(TrainingSettings, given | {"ranks": 2})
    row = check_memory(
        Facility(name="a", dataset="data", training=training),
        Deployment(type="local"),
        dataclasses.replace(ONE_BLOCK, layers=4),
        10,
        "",
    )
    rank = Ranks(rank=0, world=2, local_rank=0, local_world=2, device=torch.device("cpu"))
    try:
        layout_of_settings(rank, training, blocks=4, block_tokens=10)
        said = ""
    except ConfigurationError as error:
        said = str(error)
    assert told in said and bool(said) == bool(told)
    assert (row.verdict, row.found) == ("fail", said) if told else row.verdict == "ok"


TWO_STAGES = {"stages": 2, "replicas": 1, "grid": [[0], [1]], "stage_units": [[0, 3], [3, 6]], "micro_batches": 4}
TWO_REPLICAS = {"stages": 1, "replicas": 2, "grid": [[0, 1]], "stage_units": [[0, 6]], "micro_batches": [3, 1]}


@pytest.mark.parametrize(
    ("plan", "given", "told"),
    [
        (TWO_STAGES, {}, ""),
        (TWO_STAGES, {"ranks": 1}, "the plan uses 2 devices of 1 rank each, up to number 1, but 1 ranks came"),
        (TWO_STAGES, {"ranks": 3, "layout": {"shards": 2}}, "3 ranks are not a multiple of layout.shards 2"),
        (TWO_STAGES, {"batch_sequences": 5}, "the plan makes 4 sequences a step"),
        (TWO_REPLICAS, {}, ""),
        (TWO_REPLICAS, {"sync": {"policy": "local"}}, "replicas with unequal micro-batches need stages"),
    ],
)
def test_a_plan_that_the_trainer_would_refuse_is_told_in_its_words(
    tmp_path: Path, plan: dict[str, Any], given: dict[str, Any], told: str
):
    read = plan_from_json(plan | {"micro_batch_samples": 1})
    write_plan(tmp_path / "plan.json", read)
    layout = given.get("layout", {}) | {"plan": str(tmp_path / "plan.json")}
    facility = {
        "name": "a",
        "dataset": "d",
        "training": {"ranks": 2, "batch_sequences": 4} | given | {"layout": layout},
    }
    path = tmp_path / "federation.yml"
    path.write_text(json.dumps({"name": "f", "model": "m", "rounds": 1, "facilities": [facility]}))
    federation = read_federation(path)
    (one,) = federation.facilities
    row = checking.memory_row(federation, one, dataclasses.replace(ONE_BLOCK, layers=4), 10, "")
    world, said = one.training.ranks, ""
    ranks = Ranks(rank=0, world=world, local_rank=0, local_world=world, device=torch.device("cpu"))
    try:
        used = remapped_rank(ranks, read, one.training.layout.shards or 1)
        assert used is not None
        layout_of_plan(read, used, one.training, blocks=4, block_tokens=10)
    except ConfigurationError as error:
        said = str(error)
    assert told in said and bool(said) == bool(told)
    assert (row.verdict, row.found) == ("fail", said) if told else row.verdict == "ok"


def test_records_that_ranks_would_not_have_are_told():
    """With differential privacy the batch is a number that is expected, and every rank's share of it one or more."""
    training = TrainingSettings(ranks=2, batch_sequences=1, layout=LayoutSettings(sharding="NO_SHARD"))
    facility = Facility(name="a", dataset="data", training=training)
    row = check_memory(facility, Deployment(type="local"), ONE_BLOCK, 10, "", private=True)
    assert row.verdict == "fail" and "batch_sequences is 1, but 2 ranks read data" in row.found


@pytest.mark.parametrize(
    ("queue", "nodes", "status", "resources", "words"),
    [
        ("batch", 1, "flux-queue-stop", "flux-resource-list", ""),
        ("debug", 1, "flux-queue-stop", "flux-resource-list", "Scheduling is stopped: maintenance"),
        ("batch", 1, "flux-queue-status", "flux-resource-list", "Scheduling is stopped"),
        ("nosuch", 1, "flux-queue-stop", "flux-resource-list", "no Flux queue 'nosuch'"),
        ("batch", 99, "flux-queue-stop", "flux-resource-list", "asks for 99 nodes, Flux has 2"),
        ("batch", 2, "flux-queue-stop", "flux-resource-list-lost-node", ""),
    ],
)
def test_flux_queues_are_read_as_they_were_recorded(queue: str, nodes: int, status: str, resources: str, words: str):
    text = "".join(recorded(name).out for name in ("flux-queue-list", status, resources))
    problem, fix = flux_refusal(text, queue, nodes)
    assert words in problem and bool(problem) == bool(words) == bool(fix)


def test_facilities_that_render_conversations_otherwise_are_named():
    told = DatasetAnswer(task="chat", chat_template_sha256="a" * 64)
    west = dataclasses.replace(told, chat_template_sha256="")
    others = {"north": told, "south": told, "west": west, "lost": DatasetAnswer(error="missing")}
    (row,) = checking.check_alike(others)
    assert row.subject == "west" and row.verdict == "fail" and "has the chat template none" in row.found
    assert not checking.check_alike({"north": told, "south": told})
