"""Files that hold a secret on the coordinator's machine, and that others may read, are named by `crossfed check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.config.federation import Federation, read_federation
from coordinator.preflight import check as check_module
from coordinator.preflight.secret_files import check_secret_files
from tests.federations import write_federation

API = {
    "url": "https://api.example.org/v2",
    "system": "daint",
    "token_url": "https://auth.example.org/token",
    "client_id": "alice",
}
KEYS = (
    "sending.signing_key",
    "notify.webhook",
    "passphrase_file",
    "tunnel.passphrase_file",
    "tunnel.key",
    "transfer.key",
    "firecrest.client_secret_file",
)


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    """Of an ssh host, an HTTP interface and this machine; every key that may name a secret names one."""

    def secret(key: str) -> str:
        (tmp_path / key).write_text("secret")
        (tmp_path / key).chmod(0o600)
        return str(tmp_path / key)

    changes: dict[str, Any] = {
        "sending": {"signing_key": secret("sending.signing_key")},
        "notify": {"webhook": f"file:{secret('notify.webhook')}"},
    }
    file = write_federation(tmp_path, ["here"], **changes)
    ssh = {"type": "ssh", "host": "h.example.org", "user": "u", "workdir": "/w"}
    ssh |= {"passphrase_file": secret("passphrase_file")}
    ssh |= {"tunnel": {"host": "j.example.org"} | {k: secret(f"tunnel.{k}") for k in ("key", "passphrase_file")}}
    ssh |= {"transfer": {"host": "t.example.org", "key": secret("transfer.key")}}
    api = API | {"client_secret_file": secret("firecrest.client_secret_file")}
    fill = {"account": "a", "partition": "p"}
    queue = {"type": "firecrest", "firecrest": api, "workdir": "/w", "template": "slurm", "fill": fill}
    described = yaml.safe_load(file.read_text())
    described["facilities"] += [
        {"name": name, "dataset": "/data", "deployment": one} for name, one in (("far", ssh), ("web", queue))
    ]
    file.write_text(yaml.safe_dump(described))
    return read_federation(file)


def test_a_secret_that_others_may_read_is_a_warning_with_the_command_that_mends_it(
    federation: Federation, tmp_path: Path
):
    assert check_secret_files(federation) == []
    for key in KEYS:
        (tmp_path / key).chmod(0o640)
        (row,) = check_secret_files(federation)
        assert row.verdict == "warning" and f"`{key}`) can be read by others (mode 640)" in row.found
        assert row.fix == f"chmod 600 {tmp_path / key}"
        (tmp_path / key).unlink()
        assert check_secret_files(federation) == [], "whatever uses it says that it is not there"


def test_the_check_shows_it(federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sending.signing_key").chmod(0o644)
    monkeypatch.setattr(check_module, "check_facility", lambda *_, **__: ([], None))
    rows = check_module.check(federation.file, link=False)
    assert [row.check for row in rows if row.verdict == "warning" and row.check == "secret"] == ["secret"]
