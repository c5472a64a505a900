"""A facility's own network, mount and host-name namespaces, held open by one sleeping process.

Inside, the facility sees the machine's programs, its own files and the Python environment; other facilities, the
coordinator and `/tmp` of the host are covered. `nsenter --net` is used, not `ip netns exec`: the latter mounts a fresh
/sys, and slurmd stops without /sys/fs/cgroup.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from coordinator.testbed.command import call, detach, recall, remember, wait_until
from coordinator.testbed.layout import Site, Testbed
from facility.exchange.errors import InputError, TransientError


def exposed_paths(python_prefixes: list[Path], site: Site) -> list[Path]:
    """Directories that the facility must see wherever they lie: the Python environment and its own files."""
    wanted = [site.base, *python_prefixes]
    return [path for path in wanted if not any(path != other and path.is_relative_to(other) for other in wanted)]


def covered_paths(exposed: list[Path], root: Path) -> list[Path]:
    """Directories to lay an empty one over: the testbed's root, /tmp, and every ancestor of an exposed directory that
    other users may not enter (an interpreter under /root, for one). Outermost only."""
    covers = {root, Path("/tmp")}
    for path in exposed:
        for parent in path.parents:
            if not parent.stat().st_mode & 0o001:
                covers.add(parent)
    return sorted(path for path in covers if not any(path != other and path.is_relative_to(other) for other in covers))


def python_prefixes() -> list[Path]:
    """This interpreter's prefixes: environment and base. Raises `InputError` if other users cannot read them."""
    prefixes = sorted({Path(sys.prefix), Path(sys.base_prefix).resolve()} - {Path("/usr")})
    for prefix in prefixes:
        if prefix.stat().st_mode & 0o005 != 0o005:
            raise InputError(
                f"{prefix} (Python's) has mode {prefix.stat().st_mode & 0o777:o}, so the facilities' users cannot "
                f"run it; `chmod -R o+rX {prefix}`, or use another environment"
            )
    return prefixes


def script(site: Site, exposed: list[Path], covered: list[Path]) -> str:
    """What runs first inside the namespaces: build the facility's view, then sleep."""
    lines = [f"hostname {site.name}", "ip link set lo up", "mount -t tmpfs -o mode=0755,size=1m tmpfs /mnt"]
    for number, path in enumerate(exposed):
        lines += [f"mkdir /mnt/{number}", f"mount --rbind {shlex.quote(str(path))} /mnt/{number}"]
    for path in covered:
        mode = "1777,size=2g" if path == Path("/tmp") else "0755,size=1m"
        lines.append(f"mount -t tmpfs -o mode={mode} tmpfs {shlex.quote(str(path))}")
    for number, path in enumerate(exposed):
        lines += [f"mkdir -p {shlex.quote(str(path))}", f"mount --move /mnt/{number} {shlex.quote(str(path))}"]
    lines += [
        "umount /mnt",
        "mount -t tmpfs -o mode=0755,size=16m tmpfs /run",
        "mkdir -m 0755 /run/sshd /run/lock",
        f"mount --bind {shlex.quote(str(site.etc / 'hosts'))} /etc/hosts",
        f"touch {shlex.quote(str(site.run / 'ready'))}",
        "exec sleep infinity",
    ]
    return "#!/bin/bash\nset -euo pipefail\n" + "\n".join(lines) + "\n"


def make(testbed: Testbed, site: Site) -> None:
    """Create the namespaces and the link between coordinator and facility (a veth pair)."""
    call("ip", "netns", "add", site.namespace)
    call("ip", "link", "add", site.interface, "type", "veth", "peer", "name", "wan0", "netns", site.namespace)
    call("ip", "addr", "add", f"{site.coordinator_address}/30", "dev", site.interface)
    call("ip", "link", "set", site.interface, "up")
    call("ip", "-n", site.namespace, "addr", "add", f"{site.address}/30", "dev", "wan0")
    call("ip", "-n", site.namespace, "link", "set", "wan0", "up")
    exposed = exposed_paths(python_prefixes(), site)
    file = site.etc / "view.sh"
    file.write_text(script(site, exposed, covered_paths(exposed, testbed.root)), encoding="utf-8")
    command = ["nsenter", f"--net=/run/netns/{site.namespace}", "unshare", "--mount", "--uts", "--propagation=private"]
    process = detach([*command, "bash", str(file)], site.log / "view.log")
    remember(process.pid, site.run / "holder.pid")

    def ready() -> bool:
        if process.poll() is not None:
            raise TransientError(
                f"facility {site.name}: its namespaces could not be made: "
                f"{(site.log / 'view.log').read_text(encoding='utf-8').strip()[-400:]}"
            )
        return (site.run / "ready").exists()

    wait_until(ready, 20, f"facility {site.name}: entering its namespaces")


def enter(site: Site, *command: str | Path, user: bool = False) -> list[str]:
    """Command line that runs `command` inside the facility: as root, or as its user with the user's home and Slurm."""
    holder = recall(site.run / "holder.pid")
    if holder is None:
        raise TransientError(f"facility {site.name} is not up: no process holds its namespaces")
    line = ["nsenter", f"--target={holder}", "--net", "--mount", "--uts"]
    if user:
        line += [f"--wdns={site.home}"] if _knows_wdns() else []
        line += ["setpriv", f"--reuid={site.user}", f"--regid={site.user}", "--init-groups"]
        line += ["env", f"HOME={site.home}", f"USER={site.user}"]
    else:
        line += ["env"]
    return [*line, f"SLURM_CONF={site.slurm_conf}", *map(str, command)]


def _knows_wdns() -> bool:
    """util-linux 2.38 and later change the directory inside the namespace."""
    return "--wdns" in call("nsenter", "--help").stdout


def processes(site: Site) -> list[int]:
    """Every process inside the facility's network namespace."""
    result = call("ip", "netns", "pids", site.namespace, check=False)
    return [int(word) for word in result.stdout.split()] if result.returncode == 0 else []


def remove(site: Site) -> None:
    """Delete namespace and link; nothing happens for what is not there."""
    call("ip", "link", "del", site.interface, check=False)
    call("ip", "netns", "del", site.namespace, check=False)
