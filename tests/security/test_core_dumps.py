"""A process that holds a key or a password leaves no core dump, nor do those that it starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.distributed import Started

HOLDERS = {
    "keys drawn": "from facility.masking.private_keys import PrivateKeys; PrivateKeys(state=Path('.')).draw(0)",
    "keys read": "from facility.masking.private_keys import PrivateKeys; PrivateKeys(state=Path('.'))._drawn('x')",
    "noise": "from facility.training.privacy.randomness import SecretRandom; SecretRandom()",
    "client's secret": "from coordinator.streamflow_plugin.firecrest_client import read_secret; read_secret('secret')",
    "passphrase": """
import asyncio, asyncssh
from streamflow.deployment.connector.ssh import SSHConfig
from coordinator.streamflow_plugin.connection import CarefulContext
async def refuse(*_, passphrase, **__):
    assert passphrase == 's3cret'
    raise ConnectionError
asyncssh.connect = refuse
config = SSHConfig(False, ['none'], 5, '127.0.0.1', None, 'secret', None, 'alice')
context = CarefulContext.__new__(CarefulContext)
context._streamflow_config_dir = '.'
try:
    asyncio.run(context._get_connection(config))
except ConnectionError:
    pass
""",
    "nothing": "pass",
}
BEGIN = """
import resource
from pathlib import Path
most = resource.getrlimit(resource.RLIMIT_CORE)[1]
resource.setrlimit(resource.RLIMIT_CORE, (most, most))
"""
END = """
import subprocess
print(most, resource.getrlimit(resource.RLIMIT_CORE)[0], subprocess.check_output(['sh', '-c', 'ulimit -c']).decode())
"""


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_process_that_holds_a_key_or_a_password_leaves_no_core(holder: str, tmp_path: Path):
    (tmp_path / "secret").write_text("s3cret")
    (tmp_path / "holder.py").write_text(f"{BEGIN}\n{HOLDERS[holder]}\n{END}")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"}
    done = Started("holder", [], tmp_path / "said", environment, directory=tmp_path).ended()
    assert done.returncode == 0, done.stderr
    most, own, started = done.stdout.split()
    if most == "0":
        pytest.skip("no process may leave a core dump here")
    assert (own == "0", started == "0") == ((holder != "nothing",) * 2)
