"""Slurm: https://slurm.schedmd.com/squeue.html, scancel.html, scontrol.html, sacct.html, job_reason_codes.html."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

from coordinator.schedulers.partition import WORD, Partition, Wish, allowed_words, first_number
from coordinator.schedulers.scheduler import FORGOTTEN, BatchScheduler, Ending, exit_code

UNKNOWN = "invalid job id"
FORMAT = "%Y-%m-%dT%H:%M:%S"


class Slurm(BatchScheduler):
    """Queries `squeue` for all states, since lists of states miss some: SIGNALING is a running job just signalled.

    Asks for fields by name in the plain formats, which are the same from 22.05 to 26.05, and not by `--json`: there
    `job_state` became a list (23.11), numbers became objects, nodes a tree (24.05), and a build may be without it.
    """

    name, title, program = "slurm", "Slurm", "sbatch"
    connector = "streamflow.deployment.connector.queue_manager:SlurmConnector"
    trial = "sbatch --test-only"
    survey = (
        "sinfo -h -o 'partition|%P|%a|%l|%D|%c|%G' && scontrol -o show partition && "
        '{ sacctmgr -nP show assoc "user=$(id -un)" format=account 2>/dev/null | sed "s/^/account|/"; }'
    )
    waiting = frozenset("PENDING SUSPENDED EXPEDITING REQUEUED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT".split())
    terminal = frozenset(
        "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT".split()
    )
    suspended = frozenset({"SUSPENDED"})
    finishing = frozenset({"COMPLETING", "STAGE_OUT"})
    silent = (
        "unable to contact slurm controller",
        "socket timed out",
        "connection refused",
        "zero bytes were transmitted",
        "controller is not responding",
        "slurm backup controller in standby",
        "connect failure",
        "slurm_load_jobs error",
        "could not establish a configuration source",
        "resource temporarily unavailable",
        "unable to create job record, try again",
    )
    advice = (
        (r"JobHeldUser", "your account holds it: `scontrol release {id}` there"),
        (r"JobHeldAdmin", "the site's staff hold it: ask them why"),
        (
            r".*requeued[ _](in[ _])?(held|special[ _]exit)([ _]state)?|JobHoldMaxRequeue|JobLaunchFailure",
            "it could not be started and was held: look at its output, then `scontrol release {id}`",
        ),
        (
            r"DependencyNeverSatisfied",
            "it waits for a job that failed: remove --dependency from the template or `options:`",
        ),
        (
            r"Partition(Down|Inactive)",
            "the partition takes no jobs to its nodes: wait for the site, or name another in `fill: {partition: ...}` "
            "or the template",
        ),
        (
            r"Partition(NodeLimit|TimeLimit|Config)|MaxMemPerLimit",
            "it asks for more than the partition allows: lower nodes, time or memory; "
            "`sinfo -o '%P %l %D %m'` shows the limits",
        ),
        (
            r"(Assoc|QOS)Grp(Wall|\w+(?<!Run)Minutes)(Limit)?",
            "the budget of the account is spent: ask for more, or name another account",
        ),
        (
            r"(Assoc|QOS)Max\w+Per(Job|Node)(Limit)?|QOSMin\w+|(Association|QOS)TimeLimit",
            "it asks for more than account or QOS allow one job: `sacctmgr show assoc user=$USER` and "
            "`sacctmgr show qos` show the limits; lower what the template asks for",
        ),
        (
            r"Invalid(Account|QOS)|AccountNotAllowed|QOSNotAllowed|Job's[ _](account|QOS)[ _]not[ _].*",
            "account or QOS may not use this partition: correct `fill:` or `options:`",
        ),
        (
            r"BadConstraints|ReqNodeNotAvail.*|NodeDown",
            "nodes it asks for are down, reserved or do not exist: `sinfo -R` says why; "
            "ask for others, or wait for the site's maintenance to end",
        ),
        (r"ReservationDeleted|ReservationInvalid", "its reservation is gone: remove --reservation"),
    )

    def listing(self, name: str) -> str:
        return f"squeue -h -u \"$(id -un)\" -n {name} -o '%i %T %r'"

    def cancel(self, name: str) -> str:
        return f'scancel -u "$(id -un)" -n {name}'

    def cancel_waiting(self, name: str) -> str:
        return f'scancel -u "$(id -un)" -n {name} -t PENDING'

    def cancel_ids(self, ids: Sequence[str]) -> str:
        return f"scancel {' '.join(ids)}"

    def query(self, ids: Sequence[str]) -> str:
        return f"squeue -h -t all -o '%i %T' -j {','.join(ids)}"

    def read_states(self, text: str, code: int, ids: Sequence[str]) -> dict[str, str]:
        """squeue passes over ids that it does not know, unless it is asked for one alone: then it says so."""
        if code != 0:
            return {ids[0]: FORGOTTEN} if len(ids) == 1 and UNKNOWN in text.lower() else {}
        lines = (line.split() for line in text.splitlines())
        return {words[0]: words[1] for words in lines if len(words) == 2 and words[0] in ids}

    def query_begin(self, id: str) -> str:
        return f"env SLURM_TIME_FORMAT=%Y-%m-%dT%H:%M:%S%z squeue -h -j {id} -o %S"

    def read_begin(self, text: str) -> str:
        """`2026-11-22T10:00:00` on this machine's clock of `2026-11-22T11:00:00+0100` at the facility, in whatever
        country that is; `N/A` where the scheduler has not planned it yet (squeue(1), START_TIME).

        A gate of an earlier version gives no offset: then the time is the facility's own.
        """
        found = re.search(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d(?::\d\d)?)([+-]\d{4})?$", text.strip(), re.MULTILINE)
        if found is None:
            return ""
        try:
            return datetime.fromisoformat(found[0]).astimezone().strftime(FORMAT) if found[2] else found[1]
        except (ValueError, OverflowError):
            return ""

    def query_ending(self, id: str) -> str:
        return f"scontrol show -o job {id} || sacct -X -n -P -o State,ExitCode -j {id}"

    def read_ending(self, text: str, code: int, id: str) -> Ending | None:
        fields = dict(word.split("=", 1) for word in text.split() if "=" in word)
        if fields.get("JobId") == id and "JobState" in fields:
            return self._ending(fields["JobState"], fields.get("ExitCode", "0:0"), fields.get("StdOut", ""))
        accounted = re.findall(r"^([A-Z_]+)(?:[^A-Z_|\n][^|\n]*)?\|([0-9]{1,10}:[0-9]{1,10})$", text, re.MULTILINE)
        if accounted:
            state, code_and_signal = accounted[-1]
            return self._ending(state, code_and_signal, "")
        if UNKNOWN in text.lower():
            return Ending(state=FORGOTTEN, code=None, detail="Slurm does not know it any more")
        return None

    def _ending(self, state: str, code_and_signal: str, output: str) -> Ending | None:
        """`code_and_signal` is Slurm's `code:signal`: a cancelled job has code 0 too."""
        if state not in self.terminal:
            return None
        code, _, number = code_and_signal.partition(":")
        how = f"{state}, exit code {code}" + (f", signal {number}" if number not in ("", "0") else "")
        by_itself = state == "COMPLETED" or state == "FAILED" and number in ("", "0")
        return Ending(state=state, code=exit_code(code) if by_itself else None, detail=how, output=output)

    def read_partitions(self, text: str) -> list[Partition]:
        """A partition of unlike nodes has several lines: the kind of which there are most nodes counts."""
        allowed = {
            found[1]: frozenset() if found[2] == "ALL" else frozenset(allowed_words(found[2], ","))
            for found in re.finditer(r"^PartitionName=(\S+) .*?\bAllowAccounts=(\S+)", text, re.MULTILINE)
        }
        found: dict[str, Partition] = {}
        for line in text.splitlines():
            parts = line.split("|")
            if parts[0] != "partition" or len(parts) != 7 or not WORD.fullmatch(name := parts[1].rstrip("*")):
                continue
            one = Partition(
                name=name,
                default=parts[1].endswith("*"),
                open=parts[2] == "up",
                nodes=first_number(parts[4]),
                cores=first_number(parts[5]),
                gpus=_gpus(parts[6]),
                hours=_hours(parts[3]),
                allowed=allowed.get(name, frozenset()),
            )
            if name not in found or one.nodes > found[name].nodes:
                found[name] = one
        return list(found.values())

    def read_accounts(self, text: str) -> list[str]:
        named = re.findall(r"^account\|(.*)$", text, re.MULTILINE)
        return list(dict.fromkeys(name for name in named if WORD.fullmatch(name)))

    def blocks(self, wish: Wish) -> dict[str, str]:
        resources = [f"#SBATCH --gpus-per-node={wish.gpus}"] if wish.gpus else []
        resources += [f"#SBATCH --cpus-per-task={wish.cores}", "#SBATCH --mem=0", "#SBATCH --exclusive"]
        return {
            "account": f"#SBATCH --account={wish.account}" if wish.account else "",
            "partition": f"#SBATCH --partition={wish.partition}",
            "resources": "\n".join(resources),
            "limit": f"#SBATCH --time={wish.clock}",
        }

    def is_silence(self, text: str) -> bool:
        return super().is_silence(text) and UNKNOWN not in text.lower()


def _gpus(gres: str) -> int:
    """GPUs in sinfo's %G, such as `gpu:a100:4(S:0-1),nvme:1`."""
    return sum(first_number(found[1]) for found in re.finditer(r"\bgpu(?::[A-Za-z][\w.-]*)?:(\d+)", gres))


def _hours(limit: str) -> float:
    """sinfo's %l: `days-hours:minutes:seconds`, `infinite` or `n/a`."""
    if not (found := re.fullmatch(r"(?:(\d{1,5})-)?(?:(\d{1,5}):)?(\d{1,5}):(\d{1,2})", limit)):
        return 0.0
    days, hours, minutes, _ = (float(part or 0) for part in found.groups())
    return round(days * 24 + hours + minutes / 60, 2)


SCHEDULER = Slurm()
