"""Laws of the job templates: self-contained, strict, safe under hostile names, and run as their scheduler runs them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from coordinator.config.deployments import Connection, Deployment, job_template
from coordinator.config.federation import read_federation
from coordinator.config.firecrest import FirecrestAccess
from coordinator.engine.render import render
from facility.exchange.errors import ConfigurationError
from facility.exchange.job_names import MARK
from facility.exchange.messages.job_template import Environment, fill_template
from facility.exchange.messages.template_inheritance import find_template, read_template, unfilled_placeholders

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = sorted((ROOT / "templates").glob("*.sh"))
GOLDEN = ROOT / "tests" / "golden" / "templates"
HOSTILE = '/scratch/it\'s a "home"; touch pwned $(touch pwned) `touch pwned` ü&|<x>'
COMMAND = "cd '/tmp/a b' && export X='it'\\''s' && python3 -m facility.round --model \"$(pwd)/m o\" --out update 2>&1"
names = pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.stem)


def filled(path: Path, home: str = "~/crossfed", **environment) -> str:
    text = read_template(path)
    fill = {word: f"my-{word}" for word in unfilled_placeholders(text, {})}
    return fill_template(
        text, fill=fill, environment=Environment(home=home, **environment), workdir="/scratch/me", name=path.name
    )


def strictly(text: str, command: str = COMMAND) -> str:
    """As StreamFlow renders it, but an unknown name is an error."""
    template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(text)
    return template.render(streamflow_command=command)


def test_every_site_and_scheduler_is_there():
    wanted = {
        "slurm",
        "pbs",
        "flux",
        "gridengine",
        "ssh",
        "leonardo",
        "karolina",
        "lumi",
        "marenostrum5",
        "meluxina",
        "vega",
        "deucalion",
        "discoverer",
    }
    assert {path.stem for path in TEMPLATES} == wanted


@names
def test_first_line_is_the_guide_and_the_script_is_short(path: Path):
    lines = path.read_text().splitlines()
    assert re.fullmatch(r"\{# https://\S+ -#\}", lines[0])
    assert lines[1] in ("#!/bin/bash", '{% extends "slurm.sh" %}')
    assert 10 <= len(lines) <= 32 and len(read_template(path).splitlines()) <= 30
    assert max(len(line) for line in lines) <= 140
    assert strictly(filled(path)).startswith("#!/bin/bash\n"), "a scheduler wants the interpreter first"


@names
@pytest.mark.parametrize("home", ["~/crossfed", HOSTILE], ids=["plain", "hostile"])
def test_golden(path: Path, home: str):
    """Compared whole; CROSSFED_GOLDEN=write rewrites them."""
    text = strictly(filled(path, home))
    golden = GOLDEN / f"{path.stem}-{'plain' if home.startswith('~') else 'hostile'}.sh"
    if os.environ.get("CROSSFED_GOLDEN") == "write":
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).returncode == 0


@names
def test_accounts_and_names_are_never_shipped(path: Path):
    """What belongs to a project is a placeholder, and an unfilled one is refused by name."""
    text = read_template(path)
    for found in re.findall(r"(?:--account=|--bank=|#PBS -A )(\S+)", text):
        assert re.fullmatch(r"<[a-z]+>", found)
    words = unfilled_placeholders(text, {})
    assert (path.stem == "ssh") == (words == [])
    if words:
        with pytest.raises(ConfigurationError, match=f"<{words[0]}>"):
            fill_template(text, fill={}, environment=Environment(), workdir="/w", name=path.name)


STAND_INS = {
    "srun": '[ "${SRUN_CPUS_PER_TASK-1}" ] || { echo "no number of CPUs" >&2; exit 1; }; '
    'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "pbsdsh": 'shift; env -i PATH="$PATH" PBS_JOBID=7.pbs PBS_NODENUM=0 HOME="$HOME" "$@"; '
    'code=$?; [ $code = 0 ] || echo "pbsdsh: task 0x00000000 exit status $code"; exit 0',
    "flux": 'case "$1" in hostlist) echo node1 ;; resource) echo 1 ;; '
    'run) shift; while [ "${1#--}" != "$1" ]; do shift; done; exec "$@" ;; esac',
}


@pytest.mark.parametrize("cpus", [{"SLURM_CPUS_PER_TASK": "4"}, {}], ids=["cpus asked for", "no --cpus-per-task"])
@names
def test_the_command_arrives_whole_in_the_environment_of_the_site(path: Path, cpus: dict[str, str], tmp_path: Path):
    """Run under stand-ins for the schedulers' commands, from a home with blanks and quotes."""
    home = tmp_path / 'it\'s a "home" $(touch pwned) ü'
    home.mkdir()
    (home / "env.sh").write_text("export ENTERED=yes\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "nodes").write_text("node1\n")
    command = "printf '%s|%s|%s' \"$ENTERED\" \"$(echo \"two  words\")\" 'it'\\''s `whole` $HOME' > out; exit 7"
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "SLURM_JOB_ID": "7",
        "USER": "me",
        **cpus,
    }
    result = subprocess.run(
        ["bash", "-c", strictly(filled(path, str(home)), command)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 7, result.stderr
    assert (tmp_path / "out").read_text() == "yes|two  words|it's `whole` $HOME"
    assert not list(tmp_path.rglob("pwned"))


def test_environments_are_written_as_asked():
    path = ROOT / "templates" / "slurm.sh"
    text = filled(path, modules=["python/3.11", "cuda"], venv="~/my venv")
    assert "module load python/3.11 cuda\n. \"$HOME\"'/my venv/bin/activate'\n" in text and "env.sh" not in text
    text = filled(path, conda="fl")
    assert "conda activate fl\n" in text
    text = filled(path, image="/images/a b.sif", gpu="amd", bind=["/data"])
    assert "exec --rocm --bind /scratch/me" in text and "--bind /data '/images/a b.sif' bash -c \"$command\"" in text
    assert "--nv" in filled(path, image="x.sif", gpu="nvidia")
    with pytest.raises(ConfigurationError, match="both a venv and a conda"):
        Environment(venv="a", conda="b")


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        ({"account": "a b", "partition": "p"}, "fill.account is 'a b', but is used in a directive"),
        ({"account": "x\n#SBATCH --uid=0", "partition": "p"}, "expected text on one line"),
        ({"account": "{{ x }}", "partition": "p"}, "without double braces"),
        ({"account": "x"}, "placeholders that nothing fills: <partition>"),
        ({"account": "x", "partition": "p", "acount": "y"}, "fill has acount"),
        ({"account": "", "partition": "p"}, "expected text on one line"),
    ],
)
def test_what_cannot_stand_in_a_template_is_refused(fill: dict, message: str):
    text = read_template(ROOT / "templates" / "slurm.sh")
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        fill_template(text, fill=fill, environment=Environment(), workdir="/w", name="slurm.sh")


FACILITY = """\
  - name: far.site-1
    dataset: /data/it
    deployment:
      type: slurm
      host: login.example.org
      user: alice
      workdir: /scratch/alice/crossfed
      template: {templates}/slurm.sh
      fill: {{account: proj42, partition: gpu}}
"""


def federation(tmp_path: Path, facility: str) -> Path:
    file = tmp_path / "workflow" / "federation.yml"
    file.parent.mkdir(exist_ok=True)
    file.write_text("name: two\nmodel: model\nrounds: 2\nfacilities:\n" + facility.format(templates=ROOT / "templates"))
    return file


def test_an_ordinary_slurm_facility_takes_at_most_ten_lines(tmp_path: Path):
    assert len(FACILITY.splitlines()) <= 10
    files = render(read_federation(federation(tmp_path, FACILITY)))
    written = yaml.safe_load(files["workflow/streamflow.yml"])
    ssh, queue = written["deployments"]["facility-far.site-1-ssh"], written["deployments"]["facility-far.site-1"]
    assert ssh["config"]["nodes"] == ["login.example.org"] and ssh["config"]["checkHostKey"] is True
    assert ssh["config"]["retries"] * ssh["config"]["retryDelay"] >= 3600
    assert queue["wraps"] == "facility-far.site-1-ssh"
    assert queue["config"]["services"]["train"] == {"file": "jobs/far.site-1.sh", "jobName": "crossfed-two-far.site-1"}
    assert "--account=proj42" in files["workflow/jobs/far.site-1.sh"]
    binding = written["workflows"]["two"]["bindings"][1]
    assert binding == {
        "step": "/rounds/train_far.site-1",
        "target": {"deployment": "facility-far.site-1", "service": "train"},
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("type: slurm", "type: slrum"), "expected one of local, ssh, firecrest, flux, gridengine, pbs, slurm"),
        (("host: login", "hst: login"), "did you mean 'host'"),
        (("gpu}}", "gpu, home: $WORK/crossfed}}"), "fill.home is '$WORK/crossfed', expected an absolute path"),
        (("gpu}}", "gpu}}\n      environment: {{home: crossfed}}"), "home is 'crossfed', expected an absolute path"),
        (("gpu}}", 'gpu}}\n      environment: {{home: "~alice/c"}}'), "or one that begins with ~/"),
        (("gpu}}", "gpu}}\n      environment: {{venv: $HOME/venv}}"), "variables such as $WORK are not replaced"),
        (("workdir: /scratch", "workdir: scratch"), "expected an absolute path at the facility"),
        (("workdir: /scratch", "workdir: /scr atch"), "without blanks or quotes"),
        (("      template: {templates}/slurm.sh\n", ""), "template is missing"),
        (("user: alice", "user: -oProxyCommand=x"), "expected a login name"),
        (("host: login.example.org", "host: -oProxyCommand=x"), "expected a name or address"),
        (("user: alice", "user: alice\n      options: {{tme: 1}}"), "did you mean 'time'"),
        (("user: alice", "user: alice\n      options: {{jobName: x}}"), "is set by CrossFed itself"),
        (("user: alice", "user: alice\n      max_jobs: 0"), "expected 1 or more"),
        (
            ("user: alice", "user: alice\n      key: |\n        -----BEGIN OPENSSH PRIVATE KEY-----"),
            "expected the path of its file",
        ),
        (("user: alice", "user: alice\n      check_host_key: false"), "unknown key"),
    ],
)
def test_a_wrong_deployment_is_told_at_its_line(tmp_path: Path, change: tuple[str, str], message: str):
    file = federation(tmp_path, FACILITY.replace(*change))
    with pytest.raises(ConfigurationError, match=re.escape(message)) as error:
        render(read_federation(file))
    assert error.value.line is not None and str(file) in str(error.value)


FIRECREST = FirecrestAccess(
    url="https://api.example.org",
    system="x",
    token_url="https://id.example.org",
    client_id="me",
    client_secret_file="secret",
)


@pytest.mark.parametrize(
    "given",
    [
        {"gate": True},
        {"ssh": "system"},
        {"known_hosts": "~/known"},
        {"tunnel": Connection(host="jump.example.org")},
        {"transfer": Connection(host="data.example.org")},
        {"firecrest": FIRECREST},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_asks_for_another_machine_is_not_ignored_on_this_one(given: dict[str, Any]):
    """`type` is local where it is not written."""
    with pytest.raises(ConfigurationError, match=f"{next(iter(given))} is set, but a local facility needs none"):
        Deployment(**given)


def test_the_home_may_be_filled_in_like_any_placeholder(tmp_path: Path):
    text = FACILITY.replace("partition: gpu", "partition: gpu, home: /work/a b")
    federation_ = read_federation(federation(tmp_path, text))
    assert federation_.facilities[0].deployment.environment.home == "/work/a b"
    assert ". '/work/a b/env.sh'" in render(federation_)["workflow/jobs/far.site-1.sh"]


def test_jump_host_transfer_host_and_plain_ssh(tmp_path: Path):
    text = FACILITY.replace(
        "user: alice",
        "user: alice\n      key: ~/.ssh/fl\n      tunnel: {{host: jump.example.org:2222, user: bob}}\n"
        "      transfer: {{host: data.example.org}}",
    )
    config = yaml.safe_load(render(read_federation(federation(tmp_path, text)))["workflow/streamflow.yml"])[
        "deployments"
    ]["facility-far.site-1-ssh"]["config"]
    assert config["tunnel"] == {"hostname": "jump.example.org:2222", "username": "bob", "checkHostKey": True}
    assert config["dataTransferConnection"]["hostname"] == "data.example.org"
    assert config["sshKey"] == str(Path("~/.ssh/fl").expanduser())
    text = (
        FACILITY.replace("type: slurm", "type: ssh")
        .replace("slurm.sh", "ssh.sh")
        .replace("      fill: {{account: proj42, partition: gpu}}\n", "")
    )
    written = yaml.safe_load(render(read_federation(federation(tmp_path, text)))["workflow/streamflow.yml"])
    assert written["deployments"]["facility-far.site-1"]["config"]["services"] == {"train": "jobs/far.site-1.sh"}


@pytest.mark.parametrize("kind", ["slurm", "pbs", "flux", "ssh", "local"])
def test_streamflow_accepts_what_is_rendered(tmp_path: Path, kind: str):
    """By StreamFlow's own schema, which refuses unknown properties."""
    words = unfilled_placeholders(read_template(ROOT / "templates" / f"{kind}.sh"), {}) if kind != "local" else []
    fill = f"      fill: {{{{{', '.join(f'{word}: x' for word in words)}}}}}\n" if words else ""
    text = FACILITY.replace("type: slurm", f"type: {kind}").replace("slurm.sh", f"{kind}.sh")
    text = text.replace("      fill: {{account: proj42, partition: gpu}}\n", fill)
    if kind == "local":
        text = "  - name: far.site-1\n    dataset: /data/it\n"
    rendered = render(read_federation(federation(tmp_path, text)))
    from streamflow.config.validator import SfValidator

    SfValidator().validate(yaml.safe_load(rendered["workflow/streamflow.yml"]))


def test_a_template_of_ones_own_extends_a_shipped_one(tmp_path: Path):
    """Found by its path, its parent in templates/; what looks like jinja2 in the result reaches the job as it is."""
    (tmp_path / "mine.sh").write_text(
        '{% extends "leonardo.sh" %}\n{% block environment %}\necho {{ "${#array[@]}" }}\n{% endblock %}\n'
    )
    text = filled(find_template("mine.sh", tmp_path))
    script = strictly(text)
    assert "#SBATCH --partition=boost_usr_prod\n" in script and "\necho ${#array[@]}\n" in script and COMMAND in script
    assert find_template("leonardo", tmp_path) == ROOT / "templates" / "leonardo.sh"


@pytest.mark.parametrize("head", ["#!/bin/bash\n", "", '#!/bin/bash\n{% raw %}echo "${#array[@]}"{% endraw %}\n'])
def test_a_job_without_a_queue_is_found_by_its_name_whatever_its_template_is(tmp_path: Path, head: str):
    (tmp_path / "mine.sh").write_text(head + "{{ streamflow_command }}\n")
    deployment = Deployment(type="ssh", host="h", workdir="/scratch/me", template="mine.sh")
    script = strictly(job_template(deployment, tmp_path, "its-name") or "", f'echo "${MARK}"')
    assert script.startswith(head.partition("\n")[0])
    assert subprocess.run(["bash", "-c", script], capture_output=True, text=True).stdout.split()[-1] == "its-name"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{% extends "slrm.sh" %}', "extends slrm.sh, which is neither beside it nor one of deucalion.sh"),
        ('{% extends "mine.sh" %}', "extends mine.sh, which is neither"),
        ('{% extends "slurm.sh" %}\n{% block about %}\n{{ acount }}\n{% endblock %}\n', "'acount' is undefined"),
        ('{% extends "slurm.sh" %}\n{% block about %}\n', "mine.sh, line 2: "),
    ],
)
def test_a_template_that_cannot_be_made_is_told_by_name(tmp_path: Path, text: str, message: str):
    (tmp_path / "mine.sh").write_text(text)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        read_template(find_template("mine.sh", tmp_path))
    with pytest.raises(ConfigurationError, match="there is no template 'lmi', expected a path or one of deucalion"):
        find_template("lmi", tmp_path)


def test_no_shipped_template_uses_a_name_in_tmp_that_others_on_the_node_can_guess():
    """Whoever makes the directory first decides what is loaded from it; ids of jobs are no secret."""
    for path in sorted((ROOT / "templates").glob("*.sh")):
        for line in path.read_text().splitlines():
            assert "/tmp/" not in line or "mktemp" in line, f"{path.name}: {line}"
