"""Settings as a report may show them, and as a publication may."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SECRET = (
    "notify",
    "host",
    "user",
    "key",
    "passphrase_file",
    "known_hosts",
    "renew",
    "tunnel",
    "transfer",
    "jump",
    "firecrest",
    "signing_key",
    "allowed_signers",
    "peer_signers",
    "workdir",
)
"""Keys that are left out wherever they are: how a person logs in and signs, and addresses."""
PATHS = ("base", "plan", "reference", "trace")
"""Keys of training whose values are paths of a facility, however short."""
DIRECTORIES = ("/", "~", "./", "../")
"""How a path begins."""
DEEP = re.compile(r"[\w.@+~-]+(/[\w.@+~-]+){2,}/?")
"""A relative path of three parts or more: the name of a model or data set on the hub has two at most."""
OF_A_FACILITY = ("name", "training", "trainer")
"""Keys of a facility that are published; of one that is named, `deployment.type` too."""


def redacted(value: Any) -> Any:
    """No hosts, users, keys and addresses, and of paths the last part only."""
    if isinstance(value, dict):
        kept = {name: one for name, one in value.items() if name not in SECRET and one not in (None, "")}
        return {
            name: redacted(Path(one) if name in PATHS and isinstance(one, str) else one) for name, one in kept.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(one) for one in value]
    if isinstance(value, Path) or (isinstance(value, str) and (value.startswith(DIRECTORIES) or DEEP.fullmatch(value))):
        return f"…/{os.path.basename(str(value).rstrip('/'))}"
    return value


def published_settings(settings: Mapping[str, Any], named: Mapping[str, bool]) -> dict[str, Any]:
    """Redacted settings without accounts, templates, datasets and machines. `named`: facilities that agree to be."""
    kept = {key: value for key, value in settings.items() if key not in ("facilities", "evaluation", "submit_ahead")}
    evaluation = dict(settings.get("evaluation") or {})
    for key in ("directory", "facility", "held_out"):
        evaluation.pop(key, None)
    return kept | {
        "evaluation": evaluation,
        "facilities": [_facility(one, named.get(one["name"], False)) for one in settings.get("facilities", [])],
    }


def _facility(settings: Mapping[str, Any], named: bool) -> dict[str, Any]:
    kept = {key: settings[key] for key in OF_A_FACILITY if key in settings}
    kind = (settings.get("deployment") or {}).get("type")
    return kept | ({"deployment": {"type": kind}} if named and kind else {})
