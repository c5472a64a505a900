"""What the testbed would make, and how its options are read: no root needed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from coordinator.config.federation import read_federation
from coordinator.testbed import configuration, daemons, link, namespaces, rehearsal
from coordinator.testbed.__main__ import main, parser
from coordinator.testbed.layout import plan
from facility.exchange.errors import InputError

PYTHON = Path("/usr/bin/python3")


def test_two_facilities_share_no_name_or_address(tmp_path: Path):
    testbed = plan(tmp_path, ["north", "south-1"], network=80, python=PYTHON)
    north, south = testbed.sites
    for attribute in ("user", "namespace", "address", "coordinator_address", "interface", "nodes", "base", "home"):
        assert getattr(north, attribute) != getattr(south, attribute)
    assert south.address == "10.80.2.2"
    assert len(south.interface) <= 15 and len(south.user) <= 32  # limits of Linux


@pytest.mark.parametrize("names", [["Site"], ["a b"], ["a", "a"], [], ["x" * 17], ["../up"], ["a.b"]])
def test_names_that_linux_or_slurm_would_refuse(tmp_path: Path, names: list[str]):
    with pytest.raises(InputError):
        plan(tmp_path, names, network=80, python=PYTHON)


def test_slurm_conf_names_every_node_once_and_keeps_finished_jobs(tmp_path: Path):
    site = plan(tmp_path, ["north"], network=80, python=PYTHON).sites[0]
    text = configuration.slurm_conf(site)
    assert [line.split()[0] for line in text.splitlines() if line.startswith("NodeName=")] == [
        "NodeName=north-1",
        "NodeName=north-2",
    ]
    assert "MinJobAge=3600" in text and "AuthType=auth/munge" in text
    keys = [line.split("=")[0] for line in text.splitlines() if not line.startswith("NodeName")]
    assert len(keys) == len(set(keys))


def test_sshd_takes_keys_only(tmp_path: Path):
    site = plan(tmp_path, ["north"], network=80, python=PYTHON).sites[0]
    text = configuration.sshd_config(site, penalises=False)
    assert "PasswordAuthentication no" in text and "PermitRootLogin no" in text and "AllowUsers cf80-north" in text


@pytest.mark.skipif(not Path(daemons.SSHD).exists(), reason="there is no sshd on this machine: install openssh-server")
def test_the_installed_sshd_reads_what_is_written_for_it_and_turns_no_address_away(tmp_path: Path):
    site = plan(tmp_path, ["north"], network=80, python=PYTHON).sites[0]
    text = configuration.sshd_config(site, penalises=daemons.sshd_penalises())
    key = tmp_path / "host"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    (tmp_path / "sshd_config").write_text(text.replace(f"HostKey {site.etc}/ssh_host_ed25519_key", f"HostKey {key}"))
    done = subprocess.run([daemons.SSHD, "-T", "-f", tmp_path / "sshd_config"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {line.split()[1] for line in done.stdout.splitlines() if line.startswith("persourcepenalties ")} <= {"no"}


def test_cgroups_are_switched_off_where_slurm_can():
    assert "disabled" in configuration.cgroup_conf((23, 11)) and "disabled" in configuration.cgroup_conf((24, 5))
    assert "disabled" not in configuration.cgroup_conf((22, 5))


@pytest.mark.parametrize(
    ("text", "name", "shape"),
    [
        ("rate=200mbit", None, link.Shape(rate_bits_per_second=200e6)),
        ("site-a:rtt=100ms,loss=0.1%", "site-a", link.Shape(round_trip_seconds=0.1, loss=0.001)),
        ("rate=1.5gbit,rtt=1s", None, link.Shape(rate_bits_per_second=1.5e9, round_trip_seconds=1)),
    ],
)
def test_shapes(text: str, name: str | None, shape: link.Shape):
    found, parsed = link.parse(text)
    assert found == name
    assert parsed.rate_bits_per_second == pytest.approx(shape.rate_bits_per_second)
    assert parsed.round_trip_seconds == pytest.approx(shape.round_trip_seconds)
    assert parsed.loss == pytest.approx(shape.loss)


@pytest.mark.parametrize(
    "text", ["", "rate", "rate=fast", "rate=5", "rtt=5mbit", "loss=100%", "speed=1mbit", "rate=1mbit,rate=2mbit", "a:"]
)
def test_shapes_that_mean_nothing(text: str):
    with pytest.raises(InputError):
        link.parse(text)


def test_closed_directories_on_the_way_to_python_are_covered(tmp_path: Path):
    root = tmp_path / "testbed"
    closed = tmp_path / "closed"
    prefix = closed / "venv"
    for path in (root, prefix):
        path.mkdir(parents=True)
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == 0 or path == tmp_path:
            break
    closed.chmod(0o700)
    site = plan(root, ["north"], network=80, python=PYTHON).sites[0]
    site.base.mkdir()
    exposed = namespaces.exposed_paths([prefix, prefix / "lib"], site)
    assert exposed == [site.base, prefix]
    covered = namespaces.covered_paths(exposed, root)
    assert any(closed.is_relative_to(path) for path in covered) and any(root.is_relative_to(path) for path in covered)
    text = namespaces.script(site, exposed, covered)
    # Everything is stashed before anything is covered, and put back after.
    assert (
        text.index("mount --rbind")
        < text.index(f"mount -t tmpfs -o mode={'1777,size=2g' if Path('/tmp') in covered else '0755'}")
        < text.index("mount --move")
    )


def test_every_verb_has_help(capsys: pytest.CaptureFixture):
    for verb in ("up", "run", "down", "status", "stop", "start", "shape"):
        with pytest.raises(SystemExit) as stopped:
            parser().parse_args([verb, "--help"])
        assert stopped.value.code == 0
    assert "--root" in capsys.readouterr().out


def test_a_root_without_testbed_says_what_to_do(tmp_path: Path):
    with pytest.raises(InputError, match="no testbed under"):
        main(["status", "--root", str(tmp_path)])


def test_a_rehearsal_with_another_number_of_rounds_goes_on_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The tutorial's `crossfed testbed run --rounds 4` after `--rounds 2`: nobody could say `--accept` there."""
    testbed = plan(tmp_path, ["north", "south"], network=80, python=PYTHON)
    monkeypatch.setattr(rehearsal, "prepare_sites", lambda _: (tmp_path / "model", {"north": "/d", "south": "/d"}))
    given: list[list[str]] = []

    def started(command: list[str], **_: object) -> subprocess.CompletedProcess:
        given.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", started)
    assert rehearsal.run(testbed, rounds=2) == rehearsal.run(testbed, rounds=4) == 0
    assert all("--accept" in command for command in given)
    assert read_federation(Path(given[1][given[1].index("--federation") + 1])).rounds == 4
