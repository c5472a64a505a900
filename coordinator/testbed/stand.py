"""Stand the testbed up, and take it down without a trace."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from coordinator.bundle import copy_code
from coordinator.testbed import configuration, daemons, link, namespaces
from coordinator.testbed.command import call, end, recall, wait_until
from coordinator.testbed.layout import MARK, Site, Testbed, check_ours, load, plan, save
from coordinator.testbed.packages import require
from facility.exchange.errors import CrossFedError, InputError

FIRST_NETWORK, LAST_NETWORK = 77, 99


def up(
    root: Path,
    names: list[str],
    *,
    shapes: dict[str, link.Shape] | None = None,
    install: bool = True,
) -> Testbed:
    """Stand facilities up under `root` and return them once their nodes are idle. Whatever fails, nothing stays.

    Raises `InputError` (not root, a wrong name, a path that exists) and `TransientError` (a daemon did not start).
    """
    root = Path(root).resolve()
    require(install=install)
    with _alone():
        check_ours(root)
        if (root / MARK).exists():
            raise InputError(
                f"there is a testbed under {root} already: use it, or `crossfed testbed down --root {root}`"
            )
        if root.exists() and any(root.iterdir()):
            raise InputError(f"{root} holds other files: give an empty or new directory with --root")
        testbed = plan(root, names, network=_free_network(), python=Path(sys.executable))
        created = not root.exists()
        root.mkdir(parents=True, exist_ok=True)
        root.chmod(0o755)
        save(testbed)
        _reserve(testbed)
    try:
        _coordinator(testbed)
        for site in testbed.sites:
            _facility(testbed, site)
        for site in testbed.sites:
            wait_until(lambda site=site: daemons.nodes_idle(site), 30, f"both nodes of {site.name} idle")  # type: ignore[misc]
            _check_python(testbed, site)
        for name, shape in (shapes or {}).items():
            link.apply(testbed.site(name), shape)
    except BaseException:
        down(root)
        if not created:
            root.mkdir(exist_ok=True)
        raise
    return testbed


def down(root: Path) -> list[str]:
    """End every process, delete namespaces, links, users and files that `up` made under `root`; returns what went.

    Only what the state file names is touched; a second call finds nothing and raises `InputError`.
    """
    root = Path(root).resolve()
    testbed = load(root)
    gone = []
    for site in testbed.sites:
        with contextlib.suppress(CrossFedError):
            call(*namespaces.enter(site, "scancel", f"--user={site.user}"), check=False, timeout=5)
        relay = recall(site.run / "relay.pid")
        pids = namespaces.processes(site)
        end([*pids, *([relay] if relay else [])])
        end(namespaces.processes(site))
        namespaces.remove(site)
        gone.append(f"facility {site.name}: {len(pids)} processes, namespace {site.namespace}")
        if _user_exists(site.user):
            call("userdel", site.user)
            gone.append(f"user {site.user}")
    shutil.rmtree(root)
    gone.append(str(root))
    return gone


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One `up` at a time chooses its network."""
    path = "/run/lock/crossfed-testbed.lock" if os.path.isdir("/run/lock") else "/tmp/crossfed-testbed.lock"
    # every account may write there: no link is followed, and nothing is emptied
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _free_network() -> int:
    """Second byte of a private network that no interface, namespace or user of another testbed has."""
    addresses = call("ip", "-o", "-4", "addr").stdout
    spaces = call("ip", "netns", "list").stdout
    users = {entry.pw_name for entry in pwd.getpwall()}
    for network in range(FIRST_NETWORK, LAST_NETWORK + 1):
        taken = f" 10.{network}." in addresses or f"cf{network}-" in spaces
        if not taken and not any(user.startswith(f"cf{network}-") for user in users):
            return network
    raise InputError(f"networks 10.{FIRST_NETWORK} to 10.{LAST_NETWORK} are all in use: take a testbed down first")


def _reserve(testbed: Testbed) -> None:
    """Make the users while the lock is held: they mark the network as taken."""
    for site in testbed.sites:
        # An asterisk as password: no password fits, but the account is not locked (sshd without PAM refuses locked
        # ones).
        command = ["useradd", "--no-create-home", "--home-dir", str(site.home), "--shell", "/bin/bash"]
        call(*command, "--password", "*", site.user)


def _user_exists(name: str) -> bool:
    return any(entry.pw_name == name for entry in pwd.getpwall())


def _coordinator(testbed: Testbed) -> None:
    """The coordinator's home with a key of its own."""
    ssh = testbed.key.parent
    ssh.mkdir(parents=True)
    for path in (ssh.parent.parent, ssh.parent, ssh):
        path.chmod(0o700)
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "coordinator of the testbed", "-f", testbed.key)
    testbed.known_hosts.touch(mode=0o600)
    testbed.ssh_config.touch(mode=0o600)


def _facility(testbed: Testbed, site: Site) -> None:
    """Files, namespaces and daemons of one facility."""
    entry = pwd.getpwnam(site.user)
    for path in (site.etc, site.run, site.log, site.spool / "slurmctld", *(site.spool / node for node in site.nodes)):
        path.mkdir(parents=True)
    copy_code(site.code)
    (site.code / "templates" / "testbed.sh").write_text(configuration.site_template(), encoding="utf-8")
    for name in (".bashrc", ".profile"):
        (site.home / name).write_text(configuration.bashrc(testbed.python), encoding="utf-8")
    (site.code / "env.sh").write_text(configuration.env_sh(site, testbed.python), encoding="utf-8")
    for path in (site.home, *site.home.rglob("*")):
        os.chown(path, entry.pw_uid, entry.pw_gid)
    site.home.chmod(0o700)
    _write_configuration(testbed, site)
    namespaces.make(testbed, site)
    for service in daemons.SERVICES:
        daemons.start(site, service, clean=True)


def _write_configuration(testbed: Testbed, site: Site) -> None:
    etc = site.etc
    (etc / "munge.key").touch(mode=0o600)
    (etc / "munge.key").write_bytes(secrets.token_bytes(128))
    texts = {
        "slurm.conf": configuration.slurm_conf(site),
        "gres.conf": configuration.gres_conf(site),
        "cgroup.conf": configuration.cgroup_conf(daemons.slurm_version()),
        "sshd_config": configuration.sshd_config(site, penalises=daemons.sshd_penalises()),
        "hosts": configuration.hosts(site),
        "authorized_keys": testbed.key.with_suffix(".pub").read_text(encoding="utf-8"),
    }
    for name, text in texts.items():
        (etc / name).write_text(text, encoding="utf-8")
    null = os.makedev(1, 3)
    for number in range(configuration.GPUS):
        os.mknod(etc / f"gpu{number}", 0o666 | 0o020000, null)
        (etc / f"gpu{number}").chmod(0o666)
    host_key = etc / "ssh_host_ed25519_key"
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", site.name, "-f", host_key)
    public = " ".join(host_key.with_suffix(".pub").read_text(encoding="utf-8").split()[:2])
    with open(testbed.known_hosts, "a", encoding="utf-8") as file:
        file.write(f"{site.address} {public}\n")
    with open(testbed.ssh_config, "a", encoding="utf-8") as file:
        file.write(configuration.ssh_config_entry(site, str(testbed.key), str(testbed.known_hosts)))


def _check_python(testbed: Testbed, site: Site) -> None:
    """The user must be able to run the interpreter and import what a facility runs."""
    code = "import facility.exchange.messages.manifest, facility"
    command = namespaces.enter(site, "env", f"PYTHONPATH={site.code}", testbed.python, "-c", code, user=True)
    result = call(*command, check=False)
    if result.returncode:
        raise InputError(
            f"user {site.user} cannot run {testbed.python} -c {code!r}: "
            f"{(result.stderr or result.stdout).strip()[-300:]}"
        )
