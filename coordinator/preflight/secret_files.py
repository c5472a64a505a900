"""Preflight checks of files on the coordinator's machine that hold a secret: may others read them?

The key of a facility's login has a row of its own, since ssh refuses one that others may read. Nothing refuses these.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from coordinator.config.deployments import Connection
from coordinator.config.federation import Federation
from coordinator.preflight.row import Row, warning

WEBHOOK = "file:"
"""How `notify.webhook` begins where the address is in a file."""


def check_secret_files(federation: Federation) -> list[Row]:
    """A warning for each file of a passphrase, a key, a client's secret or a webhook that others may read."""
    rows: dict[Path, Row] = {}
    for subject, key, path in _named(federation):
        try:
            mode = stat.S_IMODE(os.stat(path).st_mode)
        except OSError:  # whatever uses it says that it is not there
            continue
        if mode & 0o044:
            found = f"{path} (`{key}`) can be read by others (mode {mode:o})"
            rows.setdefault(path, warning(subject, "secret", found, f"chmod 600 {path}"))
    return list(rows.values())


def _named(federation: Federation) -> Iterator[tuple[str, str, Path]]:
    """Subject of the row, key in federation.yml, and file."""
    if key := federation.sending.signing_key:
        yield "coordinator", "sending.signing_key", federation.path(key)
    if federation.notify.webhook.startswith(WEBHOOK):
        yield "coordinator", "notify.webhook", federation.path(federation.notify.webhook.removeprefix(WEBHOOK))
    for facility in federation.facilities:
        deployment = facility.deployment
        hosts: dict[str, Connection] = {
            "": deployment,
            "tunnel.": deployment.tunnel,
            "transfer.": deployment.transfer,
        }
        for above, host in hosts.items():
            if host.passphrase_file:
                yield facility.name, f"{above}passphrase_file", Path(host.passphrase_file).expanduser()
            if above and host.key:
                yield facility.name, f"{above}key", Path(host.key).expanduser()
        if secret := deployment.firecrest.client_secret_file:
            yield facility.name, "firecrest.client_secret_file", Path(secret).expanduser()
