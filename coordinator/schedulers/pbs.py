"""OpenPBS and PBS Professional: https://2022.help.altair.com/2022.1.0/PBS%20Professional/PBSReferenceGuide2022.1.pdf."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from coordinator.schedulers.partition import WORD, Partition, Wish, first_number
from coordinator.schedulers.scheduler import FORGOTTEN, BatchScheduler, Ending, Job, exit_code, read_answer

ANSWERS = (0, 35, 153)
"""Exit codes of qstat that are answers: success, job finished, unknown id. A server that is down gives 255."""
FINISHED = re.compile(r"qstat: (\S+) Job has finished")
UNKNOWN = re.compile(r"qstat: Unknown Job Id (\S+)")
VARIABLES = re.compile(r'([ \t]*)"Variable_List":[ \t]*\{')
"""Line with which a job's environment begins."""


class PBS(BatchScheduler):
    """Queries `qstat` without -x: with it, a server without job history (the default) exits 0 and lists no jobs."""

    name, title, program = "pbs", "PBS", "qsub"
    connector = "streamflow.deployment.connector.queue_manager:PBSConnector"
    output_file = "crossfed-job.log"
    survey = "pbsnodes -a && qstat -Q && qstat -Bf && qstat -Qf"
    waiting = frozenset("QHW")
    terminal = frozenset("FXC")
    suspended = frozenset("STU")
    finishing = frozenset("E")
    silent = (
        "cannot connect to server",
        "couldn't connect to cluster",
        "connection refused",
        "communication failure",
        "end of file",
        "timed out",
    )
    advice = (
        (r"held=\w*u.*", "your account holds it: `qrls {id}` there"),
        (r"held=.*", "the site's staff or a dependency hold it: `qstat -f {id}` shows Hold_Types and depend"),
        (
            r"(?i).*can never run.*",
            "no node of the queue has what it asks for: lower `select` in the template; `pbsnodes -a` shows what "
            "there is",
        ),
        (
            r"(?i).*queue not (started|enabled).*",
            "the queue is closed: wait for the site, or name another in `fill: {queue: ...}`",
        ),
    )

    def submission(self, name: str, output: str) -> str:
        return f"qsub -N {shlex.quote(name)} -j oe -o {shlex.quote(output)}"

    def listing(self, name: str) -> str:
        return f'ids=$(qselect -u "$(id -un)" -N {name}) && {{ [ -z "$ids" ] || qstat -f -F json $ids; }}'

    def cancel(self, name: str) -> str:
        return f'ids=$(qselect -u "$(id -un)" -N {name}) && {{ [ -z "$ids" ] || qdel $ids; }}'

    def cancel_waiting(self, name: str) -> str:
        return f'ids=$(qselect -u "$(id -un)" -N {name} -s QHW) && {{ [ -z "$ids" ] || qdel $ids; }}'

    def cancel_ids(self, ids: Sequence[str]) -> str:
        return f"qdel {' '.join(ids)}"

    def is_answer(self, text: str, code: int) -> bool:
        """Jobs that cannot be read are not the answer that there are none."""
        return code in ANSWERS and ('"Jobs"' not in text or _read(text) is not None)

    def read_listing(self, text: str) -> list[Job]:
        found = []
        for id, fields in _jobs(text).items():
            state, held = str(fields.get("job_state", "")), f"held={fields.get('Hold_Types', '')} "
            if state and state not in self.terminal:
                reason = (held if state == "H" else "") + str(fields.get("comment", ""))
                found.append((id, state, reason.strip()))
        return self.jobs(found)

    def read_partitions(self, text: str) -> list[Partition]:
        """Queues of `qstat -Q`; PBS does not say which nodes serve which, so every queue shows the largest."""
        counts = {word: [first_number(count) for count in _available(text, word)] for word in ("ncpus", "ngpus")}
        default = re.search(r"^[ \t]*default_queue = (\S+)", text, re.MULTILINE)
        limits = dict(
            re.findall(r"^Queue: (\S+)\n(?:[ \t].*\n)*?[ \t]+resources_max\.walltime = (\S+)", text, re.MULTILINE)
        )
        rows = re.findall(r"^(\S+) +\d+ +\d+ +(yes|no) +(yes|no) .*\bExe", text, re.MULTILINE)
        return [
            Partition(
                name=name,
                default=bool(default) and default[1] == name,  # type: ignore[index]
                open=(enabled, started) == ("yes", "yes"),
                nodes=len(counts["ncpus"]),
                cores=max(counts["ncpus"], default=0),
                gpus=max(counts["ngpus"], default=0),
                hours=_hours(limits.get(name, "")),
            )
            for name, enabled, started in rows
            if WORD.fullmatch(name)
        ]

    def blocks(self, wish: Wish) -> dict[str, str]:
        gpus = f":ngpus={wish.gpus}" if wish.gpus else ""
        return {
            "account": f"#PBS -A {wish.account}" if wish.account else "",
            "queue": f"#PBS -q {wish.partition}",
            "resources": f"#PBS -l select=1:ncpus={wish.cores}{gpus}\n#PBS -l place=scatter:excl",
            "limit": f"#PBS -l walltime={wish.clock}",
        }

    def query(self, ids: Sequence[str]) -> str:
        return f"qstat -f -Fjson {' '.join(ids)}"

    def read_states(self, text: str, code: int, ids: Sequence[str]) -> dict[str, str]:
        if code not in ANSWERS:
            return {}
        around = text[: text.find("{")] + text[text.rfind("}") + 1 :] if "{" in text else text
        named = dict.fromkeys(FINISHED.findall(around), "F") | dict.fromkeys(UNKNOWN.findall(around), FORGOTTEN)
        named |= {id: str(fields.get("job_state", "")) for id, fields in _jobs(text).items()}
        return {one: named[one] for one in ids if one in named}

    def query_begin(self, id: str) -> str:
        return self.query([id])

    def read_begin(self, text: str) -> str:
        """`estimated.start_time` of the job's own record, where the server estimates at all."""
        estimated = next(iter(_jobs(text).values()), {}).get("estimated")
        start = str(estimated.get("start_time", "")) if isinstance(estimated, dict) else ""
        return start if re.fullmatch(r"[\w :+-]{1,40}", start) else ""

    def query_ending(self, id: str) -> str:
        return f"qstat -xf -Fjson {id}"

    def read_ending(self, text: str, code: int, id: str) -> Ending | None:
        if code not in ANSWERS:
            return None
        fields = _jobs(text).get(id)
        if fields is None:
            none_kept = "not configured to maintain job history" in text
            if not none_kept and code != 153:
                return None
            return Ending(
                state=FORGOTTEN, code=None, detail="PBS keeps no history of jobs" if none_kept else "PBS forgot it"
            )
        if (state := str(fields.get("job_state", ""))) not in self.terminal:
            return None
        status = fields.get("Exit_status")
        host, _, path = str(fields.get("Output_Path", "")).partition(":")
        said = str(fields.get("comment", ""))
        detail = f"exit status {status}" if status is not None else "it never ran"
        return Ending(
            state=state,
            code=exit_code(status),
            detail=f"{detail} ({said})" if said else detail,
            output=path or host,
        )


def _available(text: str, resource: str) -> list[str]:
    """The resource of every node in `pbsnodes -a`."""
    return re.findall(rf"^[ \t]+resources_available\.{resource} = (\d+)", text, re.MULTILINE)


def _hours(clock: str) -> float:
    found = re.fullmatch(r"(\d{1,6}):(\d\d):\d\d", clock)
    return round(int(found[1]) + int(found[2]) / 60, 2) if found else 0.0


def _read(text: str) -> Any:
    """What `qstat -Fjson` answers; None where it cannot be read.

    PBS before 2021 prints what `qsub -V` makes of an environment (`"N":005`, functions of bash) in a form that is not
    JSON (https://github.com/openpbs/openpbs/issues/1255 and 2541): then jobs are read without it.
    """
    found = read_answer(text)
    return read_answer(_without_variables(text)) if found is None else found


def _without_variables(text: str) -> str:
    """The answer with an empty environment of every job."""
    kept, end = [], ""
    for line in text.splitlines():
        if not end and (begins := VARIABLES.fullmatch(line.rstrip())):
            end = begins[1] + "}"
        elif end and line.rstrip(" ,") == end:
            kept.append('"Variable_List":{' + line.strip())
            end = ""
        elif not end:
            kept.append(line)
    return "\n".join(kept)


def _jobs(text: str) -> dict[str, dict[str, Any]]:
    """`Jobs` of an answer of `qstat -Fjson`, complaints around it left out."""
    found = _read(text)
    jobs = found.get("Jobs") if isinstance(found, dict) else None
    return {id: one for id, one in jobs.items() if isinstance(one, dict)} if isinstance(jobs, dict) else {}


SCHEDULER = PBS()
