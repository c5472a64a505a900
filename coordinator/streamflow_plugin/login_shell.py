"""Commands in the environment of a login shell: sites put schedulers on PATH in /etc/profile.d or ~/.bash_profile."""

from __future__ import annotations

import shlex


def in_login_shell(command: str) -> str:
    """A shell line that runs a command so; what profiles print or read does not touch its streams."""
    inner = shlex.quote(f"exec {command} <&4 >&3 2>&1 3>&- 4<&-")
    return "sh -c " + shlex.quote(f"exec 3>&1 4<&0 >/dev/null 2>&1 </dev/null; exec bash -lc {inner}")
