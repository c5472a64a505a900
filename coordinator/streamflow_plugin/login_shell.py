"""Commands in the environment of a login shell: sites put schedulers on PATH in /etc/profile.d or ~/.bash_profile.

sshd gives every command to the account's own shell, which may be tcsh or fish. These know no `job=$!` and no newline
within quotes, csh replaces `!` even there, and fish reads a backslash there.
"""

from __future__ import annotations

import base64
import shlex


def in_login_shell(command: str) -> str:
    """A shell line that runs a command so; what profiles print or read does not touch its streams."""
    inner = shlex.quote(f"exec {command} <&4 >&3 2>&1 3>&- 4<&-")
    return "sh -c " + shlex.quote(f"exec 3>&1 4<&0 >/dev/null 2>&1 </dev/null; exec bash -lc {inner}")


def in_any_shell(script: str) -> str:
    """A line by which every shell has `sh` run a script of any length, with the streams that the line has."""
    packed = base64.b64encode(script.encode()).decode()
    return f"sh -c 'eval \"$(echo {packed} | base64 -d)\"'"
