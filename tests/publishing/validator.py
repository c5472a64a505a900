"""roc-validator in an environment of its own, for its dependencies conflict with CrossFed's; it asks no network.

JSON-LD contexts lie in contexts.json, cut down to the terms that our crates use: a term that is not there is an error.
Fill a cache from them: `python validator.py CACHE`, run by that environment's Python.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import venv
from pathlib import Path

PACKAGE = "roc-validator==0.13.0"
CONTEXTS = Path(__file__).with_name("contexts.json")
"""From https://w3id.org/ro/crate/1.1/context (CC0) and https://w3id.org/ro/terms/workflow-run/context."""


class Validator:
    """The command, installed from the package index into `folder`."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv", with_pip=True)
        self.bin, self.cache = folder / "venv" / "bin", folder / "cache"
        # -I: what is on PYTHONPATH is not installed there.
        pip = [self.bin / "python", "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, PACKAGE], check=True, cwd=folder)
        subprocess.run([self.bin / "python", "-I", __file__, self.cache], check=True)

    def validate(self, crate: Path, profile: str) -> subprocess.CompletedProcess[str]:
        """Of all required checks of a profile and of those it is built on; ends with 0 where none fails."""
        command = [self.bin / "rocrate-validator", "--no-interactive", "--disable-color", "validate", "--offline"]
        command += ["--cache-path", self.cache, "--profile-identifier", profile, "--no-paging", "--verbose"]
        command += ["--requirement-severity", "required", crate]
        return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=240)


def fill(cache: str) -> None:
    """Put the contexts into the HTTP cache that `--offline` reads."""
    from requests.adapters import HTTPAdapter
    from requests_cache import CachedSession
    from urllib3 import HTTPResponse

    contexts = json.loads(CONTEXTS.read_text())

    class Local(HTTPAdapter):
        def send(self, request, *_, **__):
            body = io.BytesIO(json.dumps(contexts[request.url]).encode())
            headers = {"Content-Type": "application/ld+json"}
            return self.build_response(request, HTTPResponse(body, status=200, headers=headers, preload_content=False))

    session = CachedSession(cache_name=cache, backend="sqlite", expire_after=-1)
    session.mount("https://", Local())
    for address in contexts:
        session.get(address).raise_for_status()


if __name__ == "__main__":
    fill(sys.argv[1])
