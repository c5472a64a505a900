"""Remaining disk quota of this account, from the file system's own command.

- Lustre: `lfs quota` of user, group and project (https://doc.lustre.org/lustre_manual.xhtml, chapter "Configuring and
  Managing Quotas")
- GPFS / Storage Scale: `mmlsquota -Y` (https://www.ibm.com/docs/en/storage-scale, mmlsquota command)
- everything else, NFS homes for one: `quota -w` (quota(1))
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

KIBI = 1024
SECONDS = 20
"""How long one question may take."""


@dataclass(frozen=True, kw_only=True)
class Quota:
    """One quota. A limit of 0 is none."""

    of: str
    """The file system, as the command calls it."""
    used: int
    """Bytes."""
    limit: int
    """Bytes; the hard limit, or the soft one where there is no hard one."""
    files: int = 0
    files_limit: int = 0

    @property
    def free(self) -> int | None:
        """Bytes that may still be written; None: unlimited."""
        return max(0, self.limit - self.used) if self.limit else None

    @property
    def files_free(self) -> int | None:
        return max(0, self.files_limit - self.files) if self.files_limit else None


def read_table(text: str) -> list[Quota]:
    """Rows of `quota -w` and of `lfs quota`: name, then used, soft, hard and grace in KiB and in files.

    A star marks what is exceeded, a grace may be empty in `quota`, and a long name is on a line of its own.
    """
    found, name = [], ""
    for line in text.splitlines():
        words = line.split()
        if len(words) == 1 and not re.fullmatch(r"[\d*]+", words[0]):
            name = words[0]
            continue
        if name and words and re.fullmatch(r"\[?\d+\]?\*?", words[0]):
            words = [name, *words]
        name = ""
        numbers = [word.strip("[]*") for word in words[1:]]
        if len(numbers) < 3 or not all(number.isdigit() for number in numbers[:3]):
            continue
        rest = numbers[3:] if len(numbers) > 3 and numbers[3].isdigit() else numbers[4:]
        # Without a grace, `quota` leaves its column out, and the fourth number is that of files.
        counts = [int(number) for number in rest[:3] if number.isdigit()]
        files, soft, hard = counts if len(counts) == 3 else (0, 0, 0)
        used, quota, limit = (int(number) * KIBI for number in numbers[:3])
        found.append(Quota(of=words[0], used=used, limit=limit or quota, files=files, files_limit=hard or soft))
    return found


def read_mmlsquota(text: str) -> list[Quota]:
    """Rows of `mmlsquota -Y`: fields named by the HEADER line, blocks in KiB."""
    names: list[str] = []
    found = []
    for line in text.splitlines():
        fields = line.split(":")
        if len(fields) < 3 or not fields[0].startswith("mmlsquota"):
            continue
        if fields[2] == "HEADER":
            names = fields
            continue
        row = dict(zip(names, fields, strict=False))
        try:
            number = {
                key: int(row[key])
                for key in ("blockUsage", "blockQuota", "blockLimit", "filesUsage", "filesQuota", "filesLimit")
            }
        except (KeyError, ValueError):
            continue
        found.append(
            Quota(
                of=f"{row.get('filesystemName', '?')} ({row.get('quotaType', '?')} {row.get('name', '')})",
                used=number["blockUsage"] * KIBI,
                limit=(number["blockLimit"] or number["blockQuota"]) * KIBI,
                files=number["filesUsage"],
                files_limit=number["filesLimit"] or number["filesQuota"],
            )
        )
    return found


def ask(words: list[str]) -> str:
    """A command's output; nothing where it is absent, silent or fails."""
    if shutil.which(words[0]) is None:
        return ""
    try:
        result = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout  # `quota` ends with 1 where one is exceeded


def read_quotas(folder: Path, asking: Callable[[list[str]], str] = ask) -> list[Quota]:
    """Quotas that hold for files written to `folder`, those without a limit left out."""
    lines = asking(["df", "-PT", str(folder)]).splitlines()
    words = lines[-1].split() if len(lines) > 1 else []
    device, kind, mount = (words[0], words[1], words[-1]) if len(words) >= 7 else ("", "", "")
    user = str(os.getuid())
    found: list[Quota] = []
    if kind == "lustre":
        found += read_table(asking(["lfs", "quota", "-q", "-u", user, mount]))
        found += read_table(asking(["lfs", "quota", "-q", "-g", str(folder.stat().st_gid), mount]))
        project = asking(["lfs", "project", "-d", str(folder)]).split()
        if project and project[0].isdigit() and project[0] != "0":
            found += read_table(asking(["lfs", "quota", "-q", "-p", project[0], mount]))
    elif kind == "gpfs":
        found += read_mmlsquota(asking(["mmlsquota", "-Y", Path(device).name]))
    else:
        found += [quota for quota in read_table(asking(["quota", "-w"])) if quota.of in (device, mount)]
    return [quota for quota in found if quota.limit or quota.files_limit]
