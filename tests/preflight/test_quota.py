"""Quotas as the commands of real file systems tell them, from their manuals; and the check's row."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.preflight.disk import Disk
from coordinator.preflight.facility import _room
from facility.quota import Quota, ask, read_mmlsquota, read_quotas, read_table
from tests.preflight.answers import disk_answer

NEED = Disk(parts={"models": 5 * 10**9})
LFS = """Disk quotas for usr bob (uid 500):
     Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace
/mnt/testfs      10001*  10000   11000  6d23h59m59s   30     0   20000       -
"""
LFS_QUIET = (
    "/pfs/lustrep4/scratch/project_465000000\n                 1024  2048  4096       -      10   100   200       -\n"
)
QUOTA = """Disk quotas for user alice (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
server:/export/home   7560*   5000    9000   7days      82       0       0
/dev/sda1     400     500     600              12       0      50
"""
MMLSQUOTA = """\
mmlsquota::HEADER:version:reserved:reserved:filesystemName:quotaType:id:name:blockUsage:blockQuota:blockLimit:\
blockInDoubt:blockGrace:filesUsage:filesQuota:filesLimit:filesInDoubt:filesGrace:remarks:quota:defQuota:fid:\
filesetname:
mmlsquota::0:1:::fs1:USR:1000:alice:1048576:2097152:3145728:0:none:500:0:0:0:none:i:on:off:::
"""


def test_tables_of_lustre_and_of_quota():
    (one,) = read_table(LFS)
    assert one == Quota(of="/mnt/testfs", used=10001 * 1024, limit=11000 * 1024, files=30, files_limit=20000)
    assert one.free == 999 * 1024 and one.files_free == 19970
    (two,) = read_table(LFS_QUIET)
    assert two.of.endswith("project_465000000") and two.free == 3072 * 1024 and two.files_free == 190
    home, disk = read_table(QUOTA)
    assert home == Quota(of="server:/export/home", used=7560 * 1024, limit=9000 * 1024, files=82)
    assert disk.free == 200 * 1024 and disk.files_free == 38, "an empty grace is not a column"
    assert read_table("Disk quotas for user alice (uid 1000): none\n") == []


def test_table_of_gpfs():
    (one,) = read_mmlsquota(MMLSQUOTA)
    assert one.of == "fs1 (USR alice)" and one.free == 2 << 30 and one.files_free is None
    assert read_mmlsquota("mmlsquota: command not permitted\n") == []


@pytest.mark.parametrize(
    ("df", "answers", "expected"),
    [
        (
            "10.0.0.1@tcp:/lus lustre 9 1 8 10% /scratch",
            {
                ("lfs", "quota", "-q", "-u"): LFS,
                ("lfs", "project", "-d"): "46500 P /scratch/p",
                ("lfs", "quota", "-q", "-p"): LFS_QUIET,
            },
            2,
        ),
        ("/dev/fs1 gpfs 9 1 8 10% /gpfs", {("mmlsquota", "-Y", "fs1"): MMLSQUOTA}, 1),
        ("server:/export/home nfs4 9 1 8 10% /home", {("quota", "-w"): QUOTA}, 1),
        ("/dev/sdb1 ext4 9 1 8 10% /data", {("quota", "-w"): QUOTA}, 0),
    ],
)
def test_each_file_system_is_asked_in_its_own_way(tmp_path: Path, df: str, answers: dict, expected: int):
    def asking(words: list[str]) -> str:
        if words[0] == "df":
            return f"Filesystem Type 1024-blocks Used Available Capacity Mounted on\n{df}\n"
        return next((text for start, text in answers.items() if tuple(words[: len(start)]) == start), "")

    assert len(read_quotas(tmp_path, asking)) == expected


def test_here_it_is_asked_for_real(tmp_path: Path):
    assert ask(["no-such-command-at-all"]) == ""
    assert all(quota.limit or quota.files_limit for quota in read_quotas(tmp_path))


@pytest.mark.parametrize(
    ("quota", "words"),
    [
        ({"of": "/scratch", "free": 10**9, "files_free": None}, "quota of /scratch leaves 1 GB, the rounds need 5 GB"),
        ({"of": "/scratch", "free": None, "files_free": 3}, "leaves 3 files"),
    ],
)
def test_a_small_quota_fails_the_check_with_what_to_do(quota: dict, words: str):
    row = _room("site", disk_answer({"writable": True, "free": 10**13, "quotas": [quota]}), "/scratch/work", NEED)
    assert row.verdict == "fail" and words in row.found and row.fix
    enough = {"of": "/scratch", "free": 10**12, "files_free": 10**6}
    answer = disk_answer({"writable": True, "free": 10**13, "quotas": [enough]})
    assert _room("site", answer, "/w", NEED).verdict == "ok"
