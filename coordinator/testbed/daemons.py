"""Start, stop and query munge, Slurm and sshd of one facility, each on its own, to rehearse their failure."""

from __future__ import annotations

import re
from pathlib import Path

from coordinator.testbed.command import call, end, wait_until
from coordinator.testbed.layout import Site
from coordinator.testbed.namespaces import enter, processes
from facility.exchange.errors import InputError
from facility.exchange.process_start import started_at

SERVICES = ("munged", "slurmctld", "slurmd", "sshd")
SSHD = "/usr/sbin/sshd"
SESSIONS = ("sshd:", "sshd-session:", "sshd-auth:")
"""How command lines of sshd's processes begin: what serves a session is a program of its own from OpenSSH 9.8 on."""


def start(site: Site, service: str, *, clean: bool = False) -> None:
    """Start one service inside the facility and wait for its pid file; `clean` discards Slurm's saved jobs."""
    _known(service)
    fresh = ["-c"] if clean else []
    if service == "munged":
        munge = site.run / "munge"
        files = [f"--socket={site.run}/munge.sock", f"--pid-file={munge}d.pid", f"--seed-file={munge}.seed"]
        logs = [f"--key-file={site.etc}/munge.key", f"--log-file={site.log}/munged.log"]
        call(*enter(site, "munged", *files, *logs, f"--origin={site.address}", "--num-threads=2"))
    elif service == "slurmctld":
        call(*enter(site, "slurmctld", *fresh, "-f", site.slurm_conf))
    elif service == "slurmd":
        for node in site.nodes:
            line = f"hostname {node} && exec slurmd {' '.join(fresh)} -f {site.slurm_conf}"
            call(*enter(site, "unshare", "--uts", "sh", "-c", line))
    else:
        call(*enter(site, SSHD, "-f", site.etc / "sshd_config", "-E", site.log / "sshd.log"))
    wait_until(lambda: all(pid(file) for file in pid_files(site, service)), 20, f"{site.name}: start of {service}")


def stop(site: Site, service: str, *, sessions: bool = True) -> None:
    """End one service; for sshd also the open sessions, unless `sessions` is false."""
    _known(service)
    pids = [found for file in pid_files(site, service) if (found := pid(file))]
    if service == "sshd" and sessions:
        pids += [number for number in processes(site) if title(number).startswith(SESSIONS)]
    end(pids)
    for file in pid_files(site, service):
        file.unlink(missing_ok=True)


def pid_files(site: Site, service: str) -> list[Path]:
    if service == "slurmd":
        return [site.run / f"slurmd.{node}.pid" for node in site.nodes]
    return [site.run / f"{service}.pid"]


def pid(file: Path) -> int | None:
    """The living process whose id a daemon wrote."""
    try:
        number = int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return number if started_at(number) is not None else None


def nodes_idle(site: Site) -> bool:
    """True once Slurm reports both nodes idle."""
    states = call(*enter(site, "sinfo", "-h", "-N", "-o", "%T"), check=False).stdout.split()
    return states == ["idle"] * len(site.nodes)


def slurm_version() -> tuple[int, int]:
    """Major and minor of the installed Slurm."""
    found = re.search(r"(\d+)\.(\d+)", call("slurmctld", "-V").stdout)
    if not found:
        raise InputError("`slurmctld -V` prints no version; is slurm-wlm installed completely?")
    return int(found[1]), int(found[2])


def sshd_penalises() -> bool:
    """True for an sshd that knows PerSourcePenalties, from OpenSSH 9.8 on; one without `-G` (before 9.3) is older."""
    return call(SSHD, "-G", "-f", "/dev/null", "-o", "PerSourcePenalties no", check=False).returncode == 0


def _known(service: str) -> None:
    if service not in SERVICES:
        raise InputError(f"service {service!r}: expected one of {', '.join(SERVICES)}")


def title(number: int) -> str:
    """Command line of a process, with blanks; '' once it is gone."""
    try:
        return Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
