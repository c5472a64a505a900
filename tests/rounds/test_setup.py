"""Set-up of both sides: what is there afterwards, a second run that changes nothing, mistakes told; bundles; models."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from coordinator.bundle import COMPLETE, ask_index, download, make_bundle, run_pip
from coordinator.bundle_contents import write_digests
from coordinator.config.deployments import Deployment
from coordinator.config.federation import read_federation
from coordinator.config.scaffold import write_scaffold
from coordinator.model import convert_model
from coordinator.remote_setup import _send
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.errors import CheckpointError, ConfigurationError, InputError, TransientError
from facility.gating.search_paths import SHELL
from tests.pico import save_pico
from tests.training.images import save_image_model

ROOT = Path(__file__).resolve().parents[2]
HOME = "it's a home"


def setup(side: str, *options: str, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / side / "setup.sh"), *options],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def state(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*") if p.is_file()
    }


LISTEN = """#!/bin/bash
case "$*" in
    *"-m pip"*) echo "$*" >>'{log}'; echo "${{PIP_INDEX_URL:-}}" >'{log}.index'; [[ "$*" != *" torch "* ]]; exit ;;
esac
exec '{python}' "$@"
"""
"""A Python whose pip notes what it is told, and finds no torch."""


def test_a_login_for_torchs_index_is_in_no_command_and_no_message(tmp_path: Path):
    """`ps` shows every account the words of a command; the environment is its owner's alone."""
    index, log = "http://alice:s3cret@127.0.0.1:9/whl", tmp_path / "pip"
    program = tmp_path / "home" / "venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(LISTEN.format(log=log, python=sys.executable))
    program.chmod(0o755)
    done = setup("facility", "--home", str(tmp_path / "home"), "--torch", "rocm", "--torch-index", index)
    assert done.returncode == 75 and "could not be installed from http://127.0.0.1:9/whl, see above" in done.stderr
    assert "ps shows every account of this host the login in --torch-index; in ~/.netrc" in done.stdout  # given by hand
    assert " torch " in log.read_text() and "s3cret" not in log.read_text() + done.stdout + done.stderr
    assert Path(f"{log}.index").read_text().strip() == index

    listen = "import os, sys; sys.exit('@' in str(sys.argv) or not os.environ['PIP_EXTRA_INDEX_URL'].endswith('/whl'))"
    assert run_pip([sys.executable, "-c", listen], index) == 0


@pytest.fixture
def queue(tmp_path: Path) -> str:
    """A PATH with a stand-in for sbatch and srun: the job runs at once, as Slurm would start it on one node."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sbatch").write_text(
        "#!/bin/bash\ncat > job.sh\nprintf '%s ' \"$@\" > arguments\n"
        "export SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n1 SLURM_CPUS_PER_TASK=1\nbash job.sh > slurm-7.out 2>&1\n"
    )
    (programs / "srun").write_text(
        '#!/bin/bash\nwhile [ "${1#--}" != "$1" ]; do shift; done\n'
        "export SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NODEID=0 SLURM_LOCALID=0 "
        'SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NUM_NODES=1\nexec "$@"\n'
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    return f"{programs}:{os.environ['PATH']}"


@pytest.mark.slow
def test_a_facility_is_set_up_once_and_checked_through_its_queue(tmp_path: Path, queue: str):
    home = tmp_path / HOME
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {number} of a small text" for number in range(200)))
    tokenizer = tmp_path / "tokenizer"
    make_tokenizer(tokenizer, text)
    options = [
        "--home",
        str(home),
        "--python",
        sys.executable,
        "--as-is",
        "--template",
        str(ROOT / "templates" / "slurm.sh"),
        "--fill",
        "account=a",
        "--fill",
        "partition=p",
        "--",
        "--input",
        str(text),
        "--tokenizer",
        str(tokenizer),
        "--out",
        str(home / "data"),
        "--block-tokens",
        "16",
    ]
    first = setup("facility", *options, PATH=queue)
    assert first.returncode == 0, first.stderr
    assert "self-check: 1 rank on" in first.stdout and "in three steps" in first.stdout
    assert (home / "data" / "dataset.json").is_file() and (home / "state").stat().st_mode & 0o777 == 0o700
    env = subprocess.run(
        [
            "bash",
            "-c",
            '. "$1/env.sh" && cd / && python3 -c "import facility.round, os; print(os.environ[\'CROSSFED_HOME\'])"',
            "-",
            str(home),
        ],
        capture_output=True,
        text=True,
    )
    assert env.stdout.strip() == str(home), env.stderr
    before = state(home)
    second = setup("facility", *options, PATH=queue)
    assert (
        second.returncode == 0 and "self-check: passed before" in second.stdout and "env.sh: unchanged" in second.stdout
    )
    assert state(home) == before


def make_tokenizer(folder: Path, text: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<u>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.train([str(text)], trainers.BpeTrainer(vocab_size=90, special_tokens=["<u>", "<e>"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<u>", eos_token="<e>").save_pretrained(folder)


@pytest.mark.parametrize(
    ("side", "options", "message"),
    [
        ("facility", ["--python", "no-such-python"], "no-such-python does not exist"),
        ("facility", ["--python", "OLD"], "Python 3.8.1 is too old, expected 3.11 or newer"),
        ("facility", ["--torch", "tpu"], "expected auto, cuda, rocm or cpu"),
        ("facility", ["--wheelhouse", "/nowhere"], "crossfed bundle"),
        (
            "facility",
            ["--template", "/nowhere.sh"],
            "is not a file, and no template has that name; there are: deucalion",
        ),
        ("facility", ["--template", "/tmp"], "/tmp is not a file"),
        ("facility", ["--fill", "account"], "--fill is 'account', expected NAME=VALUE"),
        ("facility", ["--python", "/bin/true"], "/bin/true does not run, see above, or is no Python"),
        ("facility", ["--home", "/dev/null/x"], "--home /dev/null/x cannot be made, see above"),
        ("coordinator", ["--python", "/bin/true"], "/bin/true does not run, see above, or is no Python"),
        (
            "facility",
            ["--template", str(ROOT / "templates" / "slurm.sh"), "--fill", "partition=x"],
            "placeholders that nothing fills: account; add --fill account=VALUE",
        ),
        ("facility", ["--hom", "x"], "unknown option --hom"),
        ("facility", ["--home"], "--home needs a value"),
        ("facility", ["--home", ""], "--home is empty"),
        ("coordinator", ["--python", "no-such-python"], "no-such-python does not exist"),
        ("coordinator", ["--modl", "x"], "unknown option --modl"),
    ],
)
def test_mistakes_in_setting_up(tmp_path: Path, side: str, options: list[str], message: str):
    old = tmp_path / "old"
    old.write_text("#!/bin/bash\ncase $* in --version) echo Python 3.8.1 ;; *print*) echo 42 ;; *) exit 1 ;; esac\n")
    old.chmod(0o755)
    options = [str(old) if word == "OLD" else word for word in options]
    home = ["--home", str(tmp_path / "home")] if side == "facility" and "--home" not in options else []
    result = setup(side, *home, *options, HOME=str(tmp_path))
    assert result.returncode == 2 and message in result.stderr, result.stderr
    assert not (tmp_path / "home" / "venv").exists()


@pytest.mark.parametrize("side", ["facility", "coordinator"])
def test_the_script_says_that_it_is_for_bash_and_needs_no_home_in_the_environment(side: str):
    script = str(ROOT / side / "setup.sh")
    posix = subprocess.run(["dash", script], capture_output=True, text=True) if shutil.which("dash") else None
    assert posix is None or (posix.returncode == 2 and f"this is a script for bash: bash {script}" in posix.stderr)
    bare = subprocess.run(["env", "-i", f"PATH={os.environ['PATH']}", "bash", script, "-h"], capture_output=True)
    assert bare.returncode == 0 and bare.stdout.startswith(b"usage: bash")


@pytest.mark.slow
def test_a_wheelhouse_that_lacks_a_package_is_told_and_no_index_is_asked(tmp_path: Path):
    (tmp_path / "wheelhouse").mkdir()
    result = setup(
        "facility",
        "--home",
        str(tmp_path / "home"),
        "--python",
        sys.executable,
        "--wheelhouse",
        str(tmp_path / "wheelhouse"),
        PIP_INDEX_URL="http://127.0.0.1:9/",
        PIP_FIND_LINKS="",
    )
    assert result.returncode == 2 and "the wheelhouse lacks a package for Python 3." in result.stderr, result.stderr
    assert "127.0.0.1" not in result.stderr and not (tmp_path / "home" / ".setup-stamp").exists()


@pytest.mark.slow  # the set-up that succeeds is above, what an offline site installs from in test_a_bundle_is_verified
def test_without_network_and_modules_a_python_that_has_everything_is_used(tmp_path: Path):
    """As on the testbed: no index answers, there is no `module`, and the account's Python has the packages already."""
    home = tmp_path / "home"
    options = ["--home", str(home), "--python", sys.executable, "--module", "python/3.11", "--torch", "cpu"]
    nowhere = "http://127.0.0.1:9/"
    first = setup("facility", *options, "--torch-index", nowhere, "--no-self-check", PIP_INDEX_URL=nowhere)
    assert first.returncode == 0, first.stderr
    assert "module: there is no such command here" in first.stdout
    assert f"using those of {sys.executable}" in first.stdout
    env = (home / "env.sh").read_text()
    assert f"PATH={Path(sys.executable).parent}" in env and "module load" not in env
    (home / "site.sh").write_text("export CROSSFED_MINIMUM_SUM=4\n")  # the site's own, which env.sh brings along
    line = 'set -eu; . "$1/env.sh"; echo "$CROSSFED_MINIMUM_SUM"'
    told = subprocess.run(["bash", "-c", line, "-", str(home)], capture_output=True, text=True)
    assert told.stdout == "4\n", told.stderr
    second = setup("facility", *options, "--torch-index", nowhere, "--no-self-check", PIP_INDEX_URL=nowhere)
    assert second.returncode == 0 and "packages: unchanged" in second.stdout and "env.sh: unchanged" in second.stdout


@pytest.mark.slow
def test_a_self_check_that_fails_is_told(tmp_path: Path, queue: str):
    template = tmp_path / "broken.sh"
    template.write_text(
        "#!/bin/bash\n#SBATCH --time=1\nsrun bash -c 'echo node on fire >&2; exit 3'\n# {{ streamflow_command }}\n"
    )
    command = [sys.executable, "-m", "facility.selfcheck", "--home", str(tmp_path), "--template", str(template)]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": queue}, cwd=ROOT)
    assert result.returncode == 2 and "the job left no update (sbatch ended with 3)" in result.stderr


def test_help_of_both_sides():
    for side in ("facility", "coordinator"):
        result = setup(side, "--help")
        assert result.returncode == 0 and "default" in result.stdout


def test_a_bundle_holds_what_a_facility_installs(tmp_path: Path):
    asked: list[tuple[list[str], str]] = []

    def run(command: list[str], index: str) -> int:
        asked.append((command, index))
        (tmp_path / "b/wheelhouse/torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl").write_bytes(b"wheel")
        return 0

    what = make_bundle(tmp_path / "b", python="3.11", platform="manylinux_2_28_x86_64", torch="rocm", run=run)
    assert what["bytes"] == 5 and json.loads((tmp_path / "b/bundle.json").read_text()) == what
    ((command, index),) = asked
    assert "--only-binary=:all:" in command and "/rocm" in index and index not in command
    assert "manylinux_2_17_x86_64" in command and "manylinux2014_x86_64" in command
    assert any(word.startswith("transformers") for word in command) and not any(
        "streamflow" in word for word in command
    )
    assert (tmp_path / "b/crossfed/facility/setup.sh").is_file() and not (tmp_path / "b/crossfed/coordinator").exists()
    checked = subprocess.run(
        [sys.executable, "-c", "import facility.round"], cwd=tmp_path / "b/crossfed", env={"PATH": os.environ["PATH"]}
    )
    assert checked.returncode == 0, "the copy stands on its own"


def tiny_wheel(wheelhouse: Path) -> Path:
    """A real wheel of a package with one empty module."""
    path = wheelhouse / "tiny_thing-1.2-py3-none-any.whl"
    record = "tiny_thing.py,,\n" + "".join(
        f"tiny_thing-1.2.dist-info/{name},,\n" for name in ("METADATA", "WHEEL", "RECORD")
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_thing.py", "")
        archive.writestr("tiny_thing-1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.2\n")
        archive.writestr(
            "tiny_thing-1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_thing-1.2.dist-info/RECORD", record)
    return path


def what_a_client_sends_reaches_nothing(place: Path, setup: list[str]) -> None:
    """sshd hands a client's variables over where the site's AcceptEnv lets it; a gate's scheduler sees none of them."""
    home, programs, seen = place / "home", place / "programs", place / "seen"
    programs.mkdir()
    (programs / "sbatch").write_text(f"#!/bin/bash\ncat >/dev/null\nenv -0 >{seen}\n")
    (programs / "sbatch").chmod(0o755)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / "key"], check=True)
    told = subprocess.run(["ssh-keygen", "-lf", place / "key.pub"], capture_output=True, text=True, check=True)
    (home / "coordinators").touch()
    policy = {
        "facility": "alpha",
        "federations": ["heron"],
        "keys": [told.stdout.split()[1]],
        "coordinators": str(home / "coordinators"),
        "workdir": str(place / "work"),
        "datasets": [str(place)],
        "scheduler": "slurm",
        "template": "slurm",
        "fill": {"account": "a", "partition": "p"},
    }
    (home / "policy.yml").write_text(json.dumps(policy))
    here = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_CONF": "/etc/slurm/ours.conf"}
    gate = [*setup, "--gate", str(place / "key.pub"), "--authorized-keys", str(place / "authorized")]
    made = subprocess.run(gate, capture_output=True, text=True, env=here)
    assert made.returncode == 0, made.stderr
    evil = place / "evil"
    evil.mkdir()
    for name in ("sitecustomize", "usercustomize", "yaml", "facility"):
        (evil / f"{name}.py").write_text(f"open({str(place / 'ran')!r}, 'w')")
    (evil / "profile").write_text(f"touch {place}/ran\n")
    sent = {
        "SSH_ORIGINAL_COMMAND": "crossfed-gate test-job",
        "HOME": str(place),
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(evil),
        "PYTHONUSERBASE": str(evil),
        "LD_LIBRARY_PATH": str(evil),
        "SLURM_CONF": f"{evil}/slurm.conf",
        "SBATCH_ACCOUNT": "another",
        "CROSSFED_STATE": str(evil),
        "CROSSFED_MINIMUM_SUM": "1",
        "HF_HOME": str(evil),
        "BASH_ENV": f"{evil}/profile",
        "BASH_FUNC_compgen%%": f"() {{ touch {place}/ran; }}",
        "TMPDIR": str(evil),
        "XDG_CACHE_HOME": str(evil),
        "CC": f"{evil}/cc",
        "GCONV_PATH": str(evil),
        "https_proxy": f"http://{evil}",
        "WANDB_BASE_URL": f"http://{evil}",
        "MODULEPATH": str(evil),
        "LMOD_RC": f"{evil}/lmodrc.lua",
        "SINGULARITY_BIND": str(evil),
        "APPTAINERENV_PYTHONPATH": str(evil),
        "CONDA_PREFIX": str(evil),
        "OMPI_MCA_mca_base_component_path": str(evil),
        "HOSTALIASES": f"{evil}/hosts",
    }
    done = subprocess.run([home / "crossfed-gate", policy["keys"][0]], env=sent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = dict(one.split("=", 1) for one in seen.read_text().split("\0") if one)
    assert not (place / "ran").exists() and str(evil) not in str(found.values())
    assert found["SLURM_CONF"] == "/etc/slurm/ours.conf" and found["CROSSFED_STATE"] == str(home / "state")
    assert not {"SBATCH_ACCOUNT", "CROSSFED_MINIMUM_SUM", "HF_HOME", "PYTHONPATH"} & set(found)


def a_further_coordinator_has_a_gate_of_its_own(place: Path, setup: list[str]) -> None:
    """Its own policy, workdir and log, and the same account of privacy; nothing in common by which it could come in."""
    home, first = place / "home", json.loads((place / "home/policy.yml").read_text())
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / "other"], check=True)
    told = subprocess.run(["ssh-keygen", "-lf", place / "other.pub"], capture_output=True, text=True, check=True)
    gate = [*setup, "--gate", str(place / "other.pub"), "--authorized-keys", str(place / "authorized")]
    gate += ["--coordinator", "ibis"]
    own = home / "gates" / "ibis"
    own.mkdir(parents=True)
    good = first | {"federations": ["ibis"], "keys": [told.stdout.split()[1]], "workdir": str(place / "elsewhere")}
    for change, reason in (
        ({"federations": ["ibis", "heron"]}, "federations heron would come in by two gates"),
        ({"keys": [*good["keys"], *first["keys"]]}, "would come in by two gates"),
        ({"workdir": f"{first['workdir']}/below"}, "the workdir of the other"),
        ({"dataset_epsilon": 4.0}, "dataset_epsilon is 4 and 0 for one dataset"),
    ):
        (own / "policy.yml").write_text(json.dumps(good | change))
        made = subprocess.run(gate, capture_output=True, text=True)
        assert made.returncode == 2 and reason in made.stdout + made.stderr, made.stdout + made.stderr
        assert str(own) not in (place / "authorized").read_text()
    (own / "policy.yml").write_text(json.dumps(good))
    made = subprocess.run(gate, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    lines = (place / "authorized").read_text().splitlines()
    assert len(lines) == 2 and lines[1].startswith(f'restrict,command="{own}/crossfed-gate SHA256:'), lines

    def ask(program: Path, key: str) -> subprocess.CompletedProcess[str]:
        sent = {"SSH_ORIGINAL_COMMAND": "crossfed-gate hello", "HOME": str(place)}
        return subprocess.run([program, key], env=sent, capture_output=True, text=True)

    hello = json.loads(ask(own / "crossfed-gate", good["keys"][0]).stdout)
    assert (hello["federations"], hello["workdir"]) == (["ibis"], str(place / "elsewhere"))
    assert "is not one of the policy's" in ask(own / "crossfed-gate", first["keys"][0]).stderr
    assert "is not one of the policy's" in ask(home / "crossfed-gate", good["keys"][0]).stderr
    assert (own / "gate/audit.jsonl").is_file()
    for program in (home / "crossfed-gate", own / "crossfed-gate"):
        assert f"CROSSFED_STATE={home}/state" in program.read_text(), "one account of a dataset's privacy"
    (own / "policy.yml").write_text(json.dumps(good | {"federations": ["heron"]}))  # read anew for every request
    closed = ask(own / "crossfed-gate", good["keys"][0])
    assert closed.returncode == 2 and "the gate is closed" in closed.stderr
    assert ask(home / "crossfed-gate", first["keys"][0]).returncode == 0, "the first one's stays open"


def tiny_bundle(out: Path) -> list[str]:
    """A bundle of one tiny wheel in `out`; the options by which it is installed."""

    def run(*_: object) -> int:
        tiny_wheel(out / "wheelhouse")
        return 0

    make_bundle(out, python="3.11", platform="manylinux_2_28_x86_64", torch="cpu", sbom=True, run=run)
    return ["--home", str(out.parent / "home"), "--python", sys.executable, "--as-is", "--no-self-check"]


def installed(out: Path, options: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", out / "crossfed/facility/setup.sh", *options], capture_output=True, text=True)


def refused(out: Path, options: list[str]) -> str:
    done = installed(out, options)
    assert done.returncode == 2 and "packages:" not in done.stdout, done.stdout
    return done.stdout + done.stderr


WHEEL = "wheelhouse/tiny_thing-1.2-py3-none-any.whl"


def test_a_bundle_is_verified_before_it_is_installed(tmp_path: Path):
    out = tmp_path / "b"
    options = tiny_bundle(out)
    (component,) = json.loads((out / "sbom.json").read_text())["components"]
    assert component["purl"] == "pkg:pypi/tiny-thing@1.2" and len(component["hashes"][0]["content"]) == 64
    lock = ["--require-hashes", "--no-deps", "--no-index", "-r", str(out / "wheelhouse/requirements.txt")]
    pip = [sys.executable, "-m", "pip", "install", "--target", str(tmp_path / "t")]
    pip += ["--find-links", str(out / "wheelhouse")]
    assert subprocess.run([*pip, *lock], capture_output=True).returncode == 0
    with (out / WHEEL).open("ab") as wheel:
        wheel.write(b"\n")
    assert "is not what its SHA256SUMS says" in (said := refused(out, options)) and WHEEL in said


def test_no_module_that_lies_beside_a_bundle_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is not part of what SHA256SUMS names, and Python looked in the folder first that a person stood in: the
    bundle's own, as `crossfed bundle` tells."""
    out, marker = tmp_path / "b", tmp_path / "run"
    options = tiny_bundle(out)
    for name in ("pip", "platform", "sysconfig", "tomllib", "torch", "transformers"):
        (out / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').write({name!r})\n")
    monkeypatch.chdir(out)
    done = installed(out, options)
    assert not marker.exists(), f"{marker.read_text()}.py"
    assert done.returncode == 0, done.stderr


def test_a_bundle_holds_one_version_of_a_package(tmp_path: Path):
    out = tmp_path / "b"
    tiny_bundle(out)
    tiny_wheel(out / "wheelhouse").rename(out / "wheelhouse/tiny_thing-1.3-py3-none-any.whl")
    tiny_wheel(out / "wheelhouse")
    with pytest.raises(InputError, match="holds tiny-thing 1.2 and 1.3"):
        make_bundle(out, python="3.11", platform="manylinux_2_28_x86_64", torch="cpu", run=lambda *_: 0)


@pytest.mark.parametrize("kept", ["crossfed/env.sh", "crossfed/data/it/train.npy", "crossfed/git/x", "crossfed"])
def test_a_bundle_takes_the_place_of_an_earlier_bundles_code_alone(tmp_path: Path, kept: str):
    """`--out ~` would replace ~/crossfed, where a facility, its data and its policy are unless it is told otherwise."""
    (tmp_path / kept).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / kept).write_text("kept")
    with pytest.raises(InputError, match="crossfed is not the code of an earlier bundle .* choose another --out"):
        tiny_bundle(tmp_path)
    assert (tmp_path / kept).read_text() == "kept" and not (tmp_path / "wheelhouse").exists()
    tiny_bundle(tmp_path / "b")
    tiny_bundle(tmp_path / "b")


@pytest.mark.parametrize("during", ["the packages come", "the code is copied"])
def test_a_bundle_whose_making_anew_was_interrupted_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, during: str
):
    """It passed for the earlier one: it was sent, and refused at the site, where copying it again does not help."""
    out = tmp_path / "b"
    tiny_bundle(out)
    assert (out / COMPLETE).is_file()

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    if during == "the code is copied":
        monkeypatch.setattr("coordinator.bundle.copy_code", interrupted)
    with pytest.raises(KeyboardInterrupt):
        options = {"python": "3.11", "platform": "manylinux_2_28_x86_64", "torch": "cpu"}
        make_bundle(out, **options, run=interrupted if during == "the packages come" else lambda *_: 0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"holds no bundle.json: `crossfed bundle --out .*` makes a bundle"):
        _send(Deployment(host="login.invalid", type="ssh", workdir="/w"), tmp_path, out)


def test_a_bundle_on_a_full_disk_says_so_and_keeps_no_half_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It asked whether there was a network; the next pip took the half for the wheel if an index has no digests."""
    wheelhouse, options = tmp_path / "b" / "wheelhouse", {"python": "3.11", "platform": "manylinux_2_28_x86_64"}
    seen: list[list[str]] = []

    def cut_off(*_: object) -> int:
        seen.append(sorted(path.name for path in wheelhouse.iterdir()))
        whole = tiny_wheel(wheelhouse)
        (wheelhouse / "half-1.0-py3-none-any.whl").write_bytes(whole.read_bytes()[:-30])
        return 2

    with monkeypatch.context() as context, pytest.raises(InputError, match=r"ended with 2: \S+ is full: free some"):
        context.setattr("tempfile.TemporaryFile", lambda dir: open("/dev/full", "wb", buffering=0))
        make_bundle(tmp_path / "b", **options, torch="cpu", run=cut_off)
    with pytest.raises(TransientError, match="is there a network"):
        make_bundle(tmp_path / "b", **options, torch="cpu", run=cut_off)
    assert seen == [[], ["tiny_thing-1.2-py3-none-any.whl"]]


def test_a_pip_that_finds_no_room_says_so_in_a_line_and_is_asked_for_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """What a full TMPDIR took was removed again by pip: its traceback was followed by a question for the network."""
    index, large = tmp_path / "index", 1 << 20
    index.mkdir()
    with zipfile.ZipFile(tiny_wheel(index), "a") as archive:
        archive.writestr("tiny_data", bytes(large))
    options = {"python": "3.11", "platform": "manylinux_2_28_x86_64", "torch": "cpu"}

    def limited(words: list[str], _: str) -> int:
        its = words[: words.index("--dest") + 2]
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (large // 2, before[1]))
        try:
            return run_pip([*its, "--no-index", "--find-links", str(index), "tiny-thing"])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    with pytest.raises(
        InputError, match=rf"found no room, see above; free some.* free now in {tmp_path}/b/wheelhouse,"
    ):
        make_bundle(tmp_path / "b", **options, run=limited)  # type: ignore[arg-type]
    said = capfd.readouterr().err
    assert "File too large" in said and "Traceback" not in said


CUT_OFF = """#!/bin/bash
for to; do :; done
[ ! -d "$to" ] || to=$to/hub/data
printf half >"$to"
exit 137
"""
"""A `cp` that is killed when half is there."""


@pytest.mark.slow
def test_data_of_tasks_whose_copying_was_cut_off_come_whole_with_the_next_setup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The half stayed, since what was there was never copied again."""
    out, cache = tmp_path / "b", tmp_path / "home" / "cache" / "huggingface"
    options = tiny_bundle(out)
    (out / "evaluation" / "hub").mkdir(parents=True)
    for name in ("data", "theirs"):
        (out / "evaluation" / "hub" / name).write_text("whole")
    (out / "evaluation" / "hub" / "link").symlink_to("data")
    write_digests(out)
    (cache / "hub").mkdir(parents=True)
    (cache / "hub" / "theirs").write_text("of the site")
    shim = tmp_path / "bin" / "cp"
    shim.parent.mkdir()
    shim.write_text(CUT_OFF)
    shim.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{shim.parent}:{os.environ['PATH']}")
        assert installed(out, options).returncode != 0
    done = installed(out, options)
    assert done.returncode == 0, done.stderr
    found = {path.name: path.read_text() for path in (cache / "hub").iterdir()}
    assert found == {"data": "whole", "link": "whole", "theirs": "of the site"}
    assert (cache / "hub" / "link").is_symlink()


@pytest.mark.slow
def test_a_bundle_is_refused_whatever_was_changed_lost_or_added(tmp_path: Path):
    """And installed when it is whole: then gates that are made of it keep coordinators apart."""
    out = tmp_path / "b"
    options = tiny_bundle(out)
    done = installed(out, options)
    assert done.returncode == 0 and "every file is what SHA256SUMS says" in done.stdout, done.stderr
    for name in (WHEEL, "wheelhouse/requirements.txt", "crossfed/facility/round.py", "sbom.json"):
        kept = (out / name).read_bytes()
        (out / name).write_bytes(kept + b"\n")
        assert "is not what its SHA256SUMS says" in (said := refused(out, options)) and name in said
        (out / name).unlink()
        assert "is not what its SHA256SUMS says" in refused(out, options), "one that was lost"
        (out / name).write_bytes(kept)
    for name in ("crossfed/yaml.py", "crossfed/facility/sitecustomize.py", "wheelhouse/other.whl"):
        (out / name).write_text("raise SystemExit('somebody else's code')")
        assert "does not name" in (said := refused(out, options)) and name in said
        (out / name).unlink()
    (out / "crossfed/yaml").symlink_to(tmp_path)
    assert "does not name, such as crossfed/yaml" in refused(out, options)
    (out / "crossfed/yaml").unlink()
    compiled = out / "crossfed/facility/__pycache__/x.pyc"
    compiled.parent.mkdir(exist_ok=True)
    compiled.write_bytes(b"somebody else's code")
    kept = (out / "SHA256SUMS").read_bytes()
    (out / "SHA256SUMS").unlink()
    assert "has no SHA256SUMS" in refused(out, options)
    (out / "SHA256SUMS").write_bytes(kept)
    setup = ["bash", str(out / "crossfed/facility/setup.sh"), *options]
    what_a_client_sends_reaches_nothing(tmp_path, setup)
    a_further_coordinator_has_a_gate_of_its_own(tmp_path, setup)
    assert not compiled.exists()


@pytest.mark.parametrize(("python", "platform"), [("3.9", "manylinux_2_28_x86_64"), ("3.11", "windows")])
def test_a_bundle_for_nowhere(tmp_path: Path, python: str, platform: str):
    with pytest.raises(InputError):
        make_bundle(tmp_path, python=python, platform=platform, torch="cpu", run=lambda *_: 0)


def test_pip_understands_the_download(tmp_path: Path):
    """pip parses the command and looks for wheels; without an index it finds none and says so."""
    command = download(tmp_path, python="3.11", platform="manylinux_2_28_aarch64")
    result = subprocess.run([*command, "--no-index"], capture_output=True, text=True)
    assert result.returncode == 1 and "No matching distribution" in result.stderr


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_models_are_converted_checked_and_recognised(tmp_path: Path, family: str):
    source = save_pico(tmp_path / "source", family)
    told = convert_model(str(source), tmp_path / "out", dtype="bfloat16", revision="main")
    modes = {path.suffix: path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes[".safetensors"] == modes[".json"], "weights are for those whom the umask lets read the rest"
    assert "loaded and evaluated" in told and set(open_checkpoint(tmp_path / "out").dtypes()) == {"BF16"}
    before = state(tmp_path / "out")
    assert "is there already" in convert_model(str(source), tmp_path / "out", dtype="bfloat16", revision="main")
    assert state(tmp_path / "out") == before
    with pytest.raises(InputError, match="was not made from"):
        convert_model(str(source), tmp_path / "out", dtype="float16", revision="main")


def test_image_classifiers_are_converted_with_their_processor_and_can_get_a_new_head(tmp_path: Path):
    from transformers import AutoConfig

    source = save_image_model(tmp_path / "source", "vit")
    told = convert_model(str(source), tmp_path / "same", dtype="float32", revision="main")
    assert "loaded and evaluated" in told and "new head" not in told
    processor = "preprocessor_config.json"
    assert (tmp_path / "same" / processor).read_bytes() == (source / processor).read_bytes()
    given, made = open_checkpoint(source), open_checkpoint(tmp_path / "same")
    assert given.tensors.keys() == made.tensors.keys()
    assert all(given.read(name).equal(made.read(name)) for name in given.tensors)
    told = convert_model(str(source), tmp_path / "other", dtype="float32", revision="main", classes=["a", "b"])
    assert "a new head of 2 classes" in told
    assert AutoConfig.from_pretrained(tmp_path / "other").id2label == {0: "a", 1: "b"}
    assert open_checkpoint(tmp_path / "other").tensors["classifier.weight"].shape[0] == 2
    with pytest.raises(InputError, match="was not made from"):
        convert_model(str(source), tmp_path / "other", dtype="float32", revision="main")
    (source / processor).unlink()
    with pytest.raises(InputError, match="holds no preprocessor_config.json"):
        convert_model(str(source), tmp_path / "third", dtype="float32", revision="main")


def test_models_that_cannot_be_used(tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM

    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no config.json"):
        convert_model(str(tmp_path / "empty"), tmp_path / "out", dtype="float32", revision="main")
    with pytest.raises(InputError, match="does not exist"):
        convert_model(str(tmp_path / "nothing"), tmp_path / "out", dtype="float32", revision="main")
    model = AutoModelForCausalLM.from_pretrained(save_pico(tmp_path / "source"))
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    with pytest.raises(CheckpointError, match="not finite"):
        convert_model(str(tmp_path / "nan"), tmp_path / "out", dtype="float32", revision="main")
    assert not (tmp_path / "out").exists() and [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("name", ["a/b/c", "two words", "x:y", "https://huggingface.co/org/name", "ü/name"])
def test_what_no_hub_can_have_is_refused_without_asking_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It was a transient error, behind the words of a library, and to be tried again."""
    monkeypatch.setattr("coordinator.model.offline_if_silent", lambda: pytest.fail("the hub is asked"))
    with pytest.raises(InputError, match=f"'{name}' is neither a folder here nor a name of the hub"):
        convert_model(name, tmp_path / "out", dtype="float32", revision="main")


def test_a_first_federation_is_refused_until_it_is_filled_in(tmp_path: Path):
    file = write_scaffold(tmp_path, "two", ["a=leonardo", "lumi", "here=local", "c=pbs"])
    text = file.read_text()
    assert "docs.hpc.cineca.it" in text and "type: pbs" in text and "fill: {account: <account>}" in text
    with pytest.raises(
        ConfigurationError, match=r"values in <angle brackets>.*facilities\[0\].deployment.host \(line 18\)"
    ):
        read_federation(file)
    with pytest.raises(InputError, match="exists already"):
        write_scaffold(tmp_path, "two", ["lumi"])
    with pytest.raises(InputError, match="there is no template 'lmi'; there are local, deucalion"):
        write_scaffold(tmp_path / "other", "two", ["lmi"])
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("name", "facilities", "words"),
    [
        ("two: ü", ["a=local"], "--name has the name 'two: ü', expected 1-63 letters"),
        ("two", ["a b=local"], "--facility has the name 'a b', expected 1-63 letters"),
        ("two", ["=local"], "--facility has the name ''"),
        ("two", ["a=local", "A=slurm"], "--facility names 'A' twice"),
        ("two", ["global=local"], "--facility: facility 'global' has the name under which curves"),
        ("two", ["a=slurm", "a-ssh=slurm"], "--facility: facility 'a-ssh' has the name of what is made for"),
        ("two", ["engine=local"], "--facility: facility 'engine' has the name of what a run itself keeps"),
    ],
)
def test_a_first_federation_has_names_that_are_read_back(tmp_path: Path, name: str, facilities: list[str], words: str):
    with pytest.raises(InputError) as caught:
        write_scaffold(tmp_path, name, facilities)
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_names_that_yaml_takes_for_numbers_are_written_as_text(tmp_path: Path):
    written = yaml.safe_load(write_scaffold(tmp_path, "2026", ["on=local", "1e3.0=slurm"]).read_text())
    assert [written["name"], *(one["name"] for one in written["facilities"])] == ["2026", "on", "1e3.0"]


PYTHON = """\
#!/bin/bash
# Stands in for a Python that has, or installs, whatever it is asked for.
case "$1 $2" in
    "-c "*"import torch"* | "-m pip") echo "${PYTHONNOUSERSITE-}:${PYTHONPATH-}" >>"$(dirname "$0")/saw" ;;&
    --version*) echo Python 3.12.1 ;;
    "-c print(6 * 7)") echo 42 ;;
    "-c "*sysconfig*) dirname "$0" ;;
    "-c "*platform*) echo 3.12-none ;;
    "-I -c") [ ! -e "$(dirname "$0")/without-pip" ] ;;
    "-m venv") rm -rf "${@: -1}" && mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
    "-m pip") echo "$*" >>"$(dirname "$0")/installed" ;;
esac
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A program that answers as Python does where setup.sh asks it."""
    program = tmp_path / "python" / "python3"
    program.parent.mkdir()
    program.write_text(PYTHON)
    program.chmod(0o755)
    return program


@pytest.fixture
def gate(tmp_path: Path, python: Path) -> list[str]:
    """Options that let `key.pub` in by a gate at `home`, whose policy is there already."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "policy.yml").touch()
    options = ["--home", str(tmp_path / "home"), "--python", str(python), "--as-is", "--no-self-check"]
    return [*options, "--gate", str(tmp_path / "key.pub"), "--authorized-keys", str(tmp_path / "authorized")]


def test_a_python_without_what_a_facility_needs_is_told_in_one_line(tmp_path: Path, python: Path):
    lacks = "echo Traceback >&2; echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1"
    fails = f"#!/bin/bash\nif [[ $* == *'import torch'* ]]; then {lacks}; fi\n"
    python.write_text(PYTHON.replace("#!/bin/bash\n", fails))
    result = setup("facility", "--home", str(tmp_path / "home"), "--python", str(python), "--as-is", "--no-self-check")
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    assert "lacks what a facility needs (ModuleNotFoundError: No module named 'torch'); leave --as-is" in result.stderr


TOO_LARGE = """\
    raise ProtocolError("Connection broken: %r" % e, e)
pip._vendor.urllib3.exceptions.ProtocolError: ("Connection broken: OSError(27, 'File too large')", OSError(27, 'File \
too large'))"""
FULL = "ERROR: Could not install packages due to an OSError: [Errno 1] {}: '/home/a/venv/torch.so'"


@pytest.mark.parametrize(
    ("said", "ended"),
    [
        (FULL.format("Disk quota exceeded"), "Disk quota exceeded: '/home/a/venv/torch.so'; free some, then"),
        (
            FULL.format("No space left on device"),
            "No space left on device: '/home/a/venv/torch.so'; free some (9 MB free ",
        ),
        (f"OSError: [Errno 27] File too large\n{TOO_LARGE}", "File too large; raise the limit on file sizes (`ulimit"),
    ],
    ids=["quota", "disk", "limit"],
)
def test_a_disk_without_room_for_the_packages_is_no_index_that_lacks_them(
    tmp_path: Path, python: Path, said: str, ended: str
):
    """The Python that was named was taken as it is, without the packages that were asked for.

    Of the two disks that pip writes to, that of TMPDIR was not named.
    """
    (tmp_path / "said").write_text(said + "\n")
    full = f'test ! -e "{tmp_path}/full" || {{ cat "{tmp_path}/said" >&2; exit 1; }}; echo'
    python.write_text(PYTHON.replace('"-m pip") echo', f'"-m pip") {full}'))
    (tmp_path / "full").touch()
    disks = "/dev/shm) echo t 9 9 900 1% /dev/shm ;; *) echo d 9 9 9999 1% / ;;"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "df").write_text(
        f"#!/bin/bash\necho Filesystem; for d; do case $d in -*) ;; {disks} esac; done\n"
    )
    (tmp_path / "bin" / "df").chmod(0o755)
    options = ["--home", str(tmp_path / "home"), "--python", str(python), "--torch", "cpu", "--no-self-check"]
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "TMPDIR": "/dev/shm"}
    result = setup("facility", *options, **environment)
    assert result.returncode == 75 and "using those of" not in result.stdout, result.stdout
    passed, error = (
        f"setup: pip: {said.splitlines()[0].removeprefix('ERROR: ')}",
        f"error: pip found no room: {ended}",
    )
    assert passed in result.stderr and result.stderr.splitlines()[-1].startswith(error), result.stderr
    assert ("9 MB free on /, 0 MB free on /dev/shm)" in result.stderr) == ("No space" in said)
    assert not (tmp_path / "home" / "env.sh").exists()
    (tmp_path / "full").unlink()
    assert setup("facility", *options).returncode == 0 and (tmp_path / "home" / "env.sh").is_file()


def test_what_pip_says_of_an_index_that_the_setup_goes_on_without_is_no_error(tmp_path: Path, python: Path):
    """Where torch's index was away, pip's ERROR lines stood in a set-up that went on and ended well."""
    fails = '[ -z "${PIP_INDEX_URL-}" ] || { echo "ERROR: Found no torch" >&2; exit 1; }; echo'
    python.write_text(PYTHON.replace('"-m pip") echo', f'"-m pip") {fails}'))
    options = ["--home", str(tmp_path / "home"), "--python", str(python), "--torch", "cpu", "--no-self-check"]
    result = setup("facility", *options)
    assert result.returncode == 0 and "gives none; taking the default index's torch" in result.stdout, result.stdout
    assert result.stderr.splitlines() == ["setup: pip: Found no torch"]


@pytest.mark.parametrize("template", [[], ["--template", str(ROOT / "templates" / "ssh.sh")]])
def test_a_self_check_says_that_it_begins_before_it_is_waited_for(tmp_path: Path, python: Path, template: list[str]):
    """A minute on a login node that computes, and however long in a queue, went by without a word; where it runs is
    said by the self-check, which has read the template: this one has no queue, and one was spoken of."""
    python.write_text(PYTHON.replace("esac\n", '    "-m facility.selfcheck") echo passed ;;\nesac\n'))
    result = setup("facility", "--home", str(tmp_path / "home"), "--python", str(python), "--as-is", *template)
    begins, passed = (line for line in result.stdout.splitlines() if "self-check" in line)
    assert begins.endswith("which is a minute once it begins") and passed == "setup: self-check: passed"
    assert "queue" not in begins


def test_what_the_shell_cannot_write_ends_with_a_sentence(tmp_path: Path, python: Path):
    (tmp_path / "home" / ".setup-stamp").mkdir(parents=True)  # as a full disk does: no file is written there
    result = setup("facility", "--home", str(tmp_path / "home"), "--python", str(python), "--no-self-check")
    assert result.returncode == 2 and "error: a command of setup.sh ended with code 1, see above" in result.stderr


@pytest.mark.parametrize("what", ["a key more", "options", "the private key"])
def test_a_gate_lets_one_key_in_and_nothing_beside_it(tmp_path: Path, gate: list[str], what: str):
    """A second line of the coordinator's file would be a line of authorized_keys by itself, and a whole shell."""
    key = (tmp_path / "key.pub").read_text()
    held = {"a key more": key + key, "options": f"no-pty {key}"}
    (tmp_path / "key.pub").write_text(held.get(what) or (tmp_path / "key").read_text())
    result = setup("facility", *gate)
    assert result.returncode == 2 and "expected one public ssh key on one line" in result.stderr, result.stderr
    assert not (tmp_path / "authorized").exists()


def test_a_gate_is_a_line_of_its_own_whatever_is_there_already(tmp_path: Path, gate: list[str]):
    (tmp_path / "authorized").write_text("ssh-ed25519 AAAAC3 me@laptop")  # as some editors leave it: no end of line
    for _ in range(2):
        result = setup("facility", *gate)
        assert result.returncode == 0, result.stderr
    first, second = (tmp_path / "authorized").read_text().splitlines()
    assert first == "ssh-ed25519 AAAAC3 me@laptop" and second.startswith('restrict,command="')


@pytest.mark.parametrize("name", ["a home", "it's", "a;b", "a$b", 'a"b'])
def test_a_home_that_a_forced_command_cannot_name_leaves_authorized_keys_alone(
    tmp_path: Path, gate: list[str], name: str
):
    (tmp_path / "home").rename(tmp_path / name)
    result = setup("facility", *gate, "--home", str(tmp_path / name))
    assert result.returncode == 2 and "authorized_keys cannot quote" in result.stderr, result.stderr
    assert not (tmp_path / "authorized").exists()


@pytest.mark.parametrize("side", ["facility", "coordinator"])
@pytest.mark.parametrize("left", ["nothing", "no pip", "no Python"])
def test_an_environment_that_was_removed_or_broken_off_is_made_and_filled_again(
    tmp_path: Path, python: Path, side: str, left: str
):
    """As after `rm -rf venv`, a set-up that was interrupted, and a system whose Python has another version now."""
    venv = tmp_path / "home" / "venv"
    place = ["--home", str(tmp_path / "home"), "--no-self-check", "--torch", "cpu"]
    options = [*(place if side == "facility" else ["--venv", str(venv)]), "--python", str(python)]
    first = setup(side, *options)
    assert first.returncode == 0 and (venv / "bin" / "installed").is_file(), first.stderr
    again = setup(side, *options)
    assert again.returncode == 0 and "packages: unchanged" in again.stdout and "making" not in again.stdout
    if left == "no pip":
        (venv / "bin" / "installed").unlink()
        (venv / "bin" / "without-pip").touch()
        (venv / ".coordinator").unlink(missing_ok=True)
    elif left == "no Python":
        (venv / "bin" / "python").unlink()
        (venv / "bin" / "python").symlink_to(tmp_path / "python-of-last-year")
    else:
        shutil.rmtree(venv)
    third = setup(side, *options)
    assert third.returncode == 0 and f"making {venv}" in third.stdout, third.stderr
    assert "packages: unchanged" not in third.stdout and (venv / "bin" / "installed").is_file()


def test_set_up_looks_for_packages_where_jobs_will(tmp_path: Path, python: Path):
    """Not among those that an account installed for itself, or that its shell names; a module's are a part of a Python
    that is used as it is."""
    (tmp_path / "modules.sh").write_text("module() { export PYTHONPATH=/of/module${PYTHONPATH:+:$PYTHONPATH}; }\n")
    module = {"BASH_ENV": str(tmp_path / "modules.sh"), "PYTHONPATH": ""}
    options = ["--home", str(tmp_path / "home"), "--python", str(python), "--module", "m", "--no-self-check"]
    for kind, seen in (("--as-is", [f"1:{ROOT}:/of/module"]), ("--torch=cpu", ["1:", "1:", f"1:{ROOT}"])):
        result = setup("facility", *options, *kind.split("="), **module)
        assert result.returncode == 0, result.stderr
        saw = (python.parent if kind == "--as-is" else tmp_path / "home" / "venv" / "bin") / "saw"
        assert saw.read_text().splitlines() == seen
        job = 'set -e; . "$1/env.sh"; echo "$PYTHONNOUSERSITE:$PYTHONPATH"'
        told = subprocess.run(
            ["bash", "-c", job, "-", str(tmp_path / "home")], env=os.environ | module, capture_output=True, text=True
        )
        assert told.stdout.strip() == seen[-1], told.stderr
    env = (tmp_path / "home" / "env.sh").read_text()
    (tmp_path / "home" / "env.sh").write_text(env.replace("/etc/profile", str(tmp_path / "modules.sh")))
    bare = {name: value for name, value in os.environ.items() if "module" not in name} | {"PYTHONPATH": ""}
    job = ["bash", "-c", job, "-", str(tmp_path / "home")]
    told = subprocess.run(job, env=bare, capture_output=True, text=True)
    assert told.returncode == 0 and "not found" not in told.stderr, "a task of PBS has no function of the job's shell"


@pytest.mark.parametrize("name", ["./python3", "./python3.12"])
def test_jobs_start_the_python_that_was_named(tmp_path: Path, python: Path, name: str):
    """However it was named, and whatever is called `python3` beside it, which is what a job says."""
    if name != "./python3":
        shutil.copy(python, python.parent / name)
        python.write_text("#!/bin/bash\necho Python 3.6.8\n")
    options = ["--home", str(tmp_path / "home"), "--python", name, "--as-is", "--no-self-check"]
    for said in ("written to", "unchanged"):
        result = setup("facility", *options, folder=python.parent)
        assert result.returncode == 0 and f"env.sh: {said}" in result.stdout, result.stderr
    job = '. "$1/env.sh" && cd / && python3 --version'
    told = subprocess.run(["bash", "-c", job, "-", str(tmp_path / "home")], capture_output=True, text=True)
    assert told.stdout == "Python 3.12.1\n", told.stderr


def test_a_sites_modules_may_use_what_is_not_set_and_fail_where_it_does_not_matter(tmp_path: Path, python: Path):
    """They are made for a shell that goes on; `site.sh` too is sourced as a job would."""
    (tmp_path / "modules.sh").write_text('module() { false; LOADED="$LOADED:$2"; }\n')
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "site.sh").write_text('export SITE="$SITE:set"\nfalse\n')
    options = ["--home", str(tmp_path / "home"), "--python", str(python), "--module", "m", "--as-is"]
    result = setup("facility", *options, BASH_ENV=str(tmp_path / "modules.sh"))
    assert result.returncode == 0 and "self-check: " in result.stdout, result.stderr


def test_what_modules_leave_on_a_search_path_is_not_looked_for_where_a_job_runs(tmp_path: Path, python: Path):
    """A coordinator writes there: by `LD_LIBRARY_PATH=/of/module:` srun, and what modules start, load its libraries."""
    leave = 'module() { ls >>"$HOME/seen"; export LD_LIBRARY_PATH="/of/module:${LD_LIBRARY_PATH:-}"; }\n'
    (tmp_path / "modules.sh").write_text(leave)
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "planted").touch()
    options = ["--home", str(tmp_path / "home"), "--python", str(python), "--module", "m", "--module", "n", "--as-is"]
    site = {"BASH_ENV": str(tmp_path / "modules.sh"), "LD_LIBRARY_PATH": "", "HOME": str(tmp_path)}
    result = setup("facility", *options, "--no-self-check", **site)
    assert result.returncode == 0, result.stderr
    env = tmp_path / "home" / "env.sh"
    assert f"\n{SHELL}\n" in env.read_text()
    job = ["bash", "-euc", f'. {env}; echo "$LD_LIBRARY_PATH $PWD"']
    (tmp_path / "seen").unlink()
    told = subprocess.run(job, cwd=tmp_path / "job", env=os.environ | site, capture_output=True, text=True)
    assert told.stdout == f"/of/module:/of/module {tmp_path}/job\n", told.stderr
    assert "planted" not in (tmp_path / "seen").read_text()


def test_a_shell_that_looks_for_directories_elsewhere_changes_nothing(tmp_path: Path, python: Path):
    options = ["--home", str(tmp_path / "home"), "--python", str(python), "--as-is", "--no-self-check"]
    program = ["bash", "facility/setup.sh", *options]
    result = subprocess.run(program, cwd=ROOT, env=os.environ | {"CDPATH": "."}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert f"PYTHONPATH={ROOT}\n" in (tmp_path / "home" / "env.sh").read_text()


@pytest.mark.parametrize(("code", "ends"), [(1, 75), (71, 0)])
def test_a_file_system_without_locks_is_not_taken_for_another_set_up(
    tmp_path: Path, python: Path, code: int, ends: int
):
    """flock(1) ends with 1 where another holds the lock; otherwise it says what is wrong, as on Lustre without them."""
    (python.parent / "flock").write_text(f"#!/bin/bash\nexit {code}\n")
    (python.parent / "flock").chmod(0o755)
    options = ["--home", str(tmp_path / "home"), "--python", str(python), "--as-is", "--no-self-check"]
    result = setup("facility", *options, PATH=f"{python.parent}:{os.environ['PATH']}")
    assert result.returncode == ends, result.stderr
    assert ("another setup.sh works in" in result.stderr) == (code == 1)
    assert ("a file system without locks" in result.stdout) == (code != 1)


def test_another_bundle_in_the_same_place_is_installed(tmp_path: Path, python: Path):
    """As after the first one's torch was for another driver: its place, Python and constraints are the same."""
    wheelhouse = tmp_path / "wheelhouse"
    wheelhouse.mkdir()
    options = ["--home", str(tmp_path / "home"), "--python", str(python), "--no-self-check"]
    options += ["--wheelhouse", str(wheelhouse)]
    for version, unchanged in (("cu128", False), ("cu128", True), ("cu130", False)):
        (wheelhouse / "requirements.txt").write_text(f"torch==2.13.0+{version} --hash=sha256:00\n")
        result = setup("facility", *options)
        assert result.returncode == 0, result.stderr
        assert ("packages: unchanged" in result.stdout) == unchanged


@pytest.fixture
def silent_index():
    """The address of an index that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/whl/cpu"


def test_an_index_that_does_not_answer_is_asked_once(silent_index: str, monkeypatch):
    """pip asks it for each of thirty packages, six times each, and then takes torch for another device elsewhere."""
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(TransientError, match=r"does not answer \(.*timed out\).*--torch-index"):
        ask_index(silent_index, seconds=0.1)
    with pytest.raises(TransientError, match=r"does not answer .*refused"):
        ask_index("http://127.0.0.1:9/simple")
    ask_index("file:///srv/wheels")
    for address in ("nonsense", "ftp://a/b", "https://"):
        with pytest.raises(InputError, match="--torch-index is .*expected an address"):
            ask_index(address)


def test_an_index_that_is_none_leaves_no_folder(tmp_path: Path):
    with pytest.raises(InputError, match="--torch-index is"):
        make_bundle(tmp_path / "b", python="3.11", platform="manylinux_2_28_x86_64", torch="cpu", index="nonsense")
    assert list(tmp_path.iterdir()) == []


def test_a_login_in_an_index_s_address_is_for_pip_and_nobody_else(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    asked: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                asked.append(connection.recv(10_000).decode())
                connection.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        ask_index(f"http://alice:s3cret@127.0.0.1:{server.getsockname()[1]}/simple", seconds=20)
        thread.join(20)
    assert asked[0].startswith("HEAD /simple ") and "s3cret" not in asked[0]
    for address in ("http://alice:s3cret@127.0.0.1:9/simple", "alice:s3cret@host/simple"):
        with pytest.raises((TransientError, InputError)) as caught:
            ask_index(address)
        assert "s3cret" not in str(caught.value) and "nonnumeric" not in str(caught.value)


def test_a_bundle_of_a_silent_index_ends_before_pip_begins(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("coordinator.bundle.run_pip", pytest.fail)
    monkeypatch.setenv("no_proxy", "*")
    options = {"python": "3.11", "platform": "manylinux_2_28_x86_64", "torch": "cpu"}
    with pytest.raises(TransientError, match="does not answer"):
        make_bundle(tmp_path / "b", **options, index="http://127.0.0.1:9/simple")  # type: ignore[arg-type]


@pytest.mark.parametrize("deaf", [False, True], ids=["cleans up", "does not hear"])
def test_an_interrupted_pip_has_ended_and_cleaned_up_before_the_command_ends(tmp_path: Path, monkeypatch, deaf: bool):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("coordinator.bundle.END_SECONDS", 0.2 if deaf else 60.0)
    script = "import os, signal, sys, time\nfrom pathlib import Path\n"
    script += "signal.signal(signal.SIGINT, signal.SIG_IGN if sys.argv[2] == 'True' else signal.default_int_handler)\n"
    script += "Path('pid').write_text(str(os.getpid()))\nos.kill(os.getppid(), signal.SIGINT)\n"
    script += "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(600)\n"
    script += "finally:\n    time.sleep(0.6)\n    Path(sys.argv[1]).touch()\n"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored behind a shell
    try:
        with pytest.raises(KeyboardInterrupt):
            run_pip([sys.executable, "-c", script, str(tmp_path / "cleaned"), str(deaf)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "cleaned").exists() != deaf
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


@pytest.fixture
def meanwhile(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run bash's command, in which `meanwhile` is the script that says every `nap` seconds, not 25, that it goes on."""

    def run(command: str, nap: str = "0.1") -> subprocess.CompletedProcess[str]:
        script = (ROOT / "facility/meanwhile.sh").read_text()
        assert script.count("sleep 25 ") == 1
        (tmp_path / "meanwhile.sh").write_text(script.replace("sleep 25 ", f"sleep {nap} "))
        given = f'meanwhile() {{ bash {tmp_path}/meanwhile.sh "$@"; }}\n{command}'
        return subprocess.run(["bash", "-euc", given], capture_output=True, text=True, timeout=60)

    return run


def test_while_pip_or_the_queue_takes_long_a_line_now_and_then_says_so(meanwhile):
    """pip is quiet until all is installed, and a self-check's job may wait in the queue for an hour."""
    done = meanwhile('out=$(meanwhile "installing" bash -c "sleep 0.5; echo whole; exit 3") || echo "$? $out"')
    assert done.stdout == "3 whole\n", "what a command prints, and its code, are its own"
    told = done.stderr.splitlines()
    assert len(told) >= 2 and all(re.fullmatch(r"installing \(\d+ s\)", line) for line in told)
    assert meanwhile('meanwhile "installing" false; echo went on').returncode == 1
    assert meanwhile('meanwhile "installing" echo "a b"').stdout == "a b\n"
    for words in ("", '"installing"'):
        assert meanwhile(f"meanwhile {words}").returncode == 2


def test_nothing_that_waits_to_say_so_holds_the_lock_or_the_callers_streams(tmp_path: Path, meanwhile):
    """A second set-up was told that another works there, and an ssh session would have stayed open, for 25 seconds."""
    lock, began = tmp_path / "lock", time.monotonic()
    done = meanwhile(
        f'exec 9>{lock}; flock -n 9; meanwhile "x" sleep 0.5 3>&1; exec 9>&-; flock -n {lock} echo free', "50"
    )
    assert done.stdout == "free\n" and time.monotonic() - began < 40
