"""Find the Debian packages that the testbed lacks, and install them without starting their services."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from facility.exchange.errors import InputError, TransientError

COMMANDS = {
    "slurmctld": "slurm-wlm",
    "munged": "munge",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "rsync": "rsync",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "useradd": "passwd",
}
"""Command that must be found -> package that brings it."""
SEARCH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin", "/usr/bin"])
POLICY = Path("/usr/sbin/policy-rc.d")


def missing() -> list[str]:
    """Packages whose commands are not there."""
    return sorted({package for command, package in COMMANDS.items() if shutil.which(command, path=SEARCH) is None})


def require(*, install: bool) -> list[str]:
    """Make sure that every package is there; returns those installed now.

    Raises `InputError` without root, without apt-get, or when something is missing and `install` is false;
    `TransientError` when apt-get fails.
    """
    if os.geteuid() != 0:
        raise InputError(
            "the testbed makes users, namespaces and daemons: run it as root (found user id "
            f"{os.geteuid()}); on a shared machine use a container or a virtual machine"
        )
    packages = missing()
    if not packages:
        return []
    command = f"apt-get install -y --no-install-recommends {' '.join(packages)}"
    if not install:
        raise InputError(f"packages {', '.join(packages)} are missing: run `{command}`, or leave out --no-install")
    if shutil.which("apt-get") is None:
        raise InputError(
            f"packages {', '.join(packages)} are missing and there is no apt-get: install their equivalents by hand"
        )
    print(f"installing {', '.join(packages)} (their services are not started)", flush=True)
    _install(packages)
    if still := missing():
        raise InputError(f"`{command}` succeeded but {', '.join(still)} did not bring the commands expected")
    return packages


def _install(packages: list[str]) -> None:
    """apt-get install, with services kept from starting (Debian policy manual, invoke-rc.d and policy-rc.d)."""
    ours = not POLICY.exists()
    if ours:
        POLICY.write_text("#!/bin/sh\nexit 101\n", encoding="utf-8")
        POLICY.chmod(0o755)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages]
    try:
        first = subprocess.run(install, env=environment, capture_output=True, text=True, errors="replace")
        if first.returncode:  # most often: package lists are empty or old
            subprocess.run(["apt-get", "update", "-q"], env=environment, capture_output=True)
            first = subprocess.run(install, env=environment, capture_output=True, text=True, errors="replace")
        if first.returncode:
            raise TransientError(
                f"`{' '.join(install)}` ended with code {first.returncode}: "
                f"{(first.stderr or first.stdout).strip()[-500:]}"
            )
    finally:
        if ours:
            POLICY.unlink(missing_ok=True)
