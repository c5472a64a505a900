"""Grid engine (SGE and its successors): https://gridscheduler.sourceforge.net/htmlman/htmlman1/qsub.html, qstat, qacct.

An ended job is in no listing: `qstat -j` says that it does not exist, `qacct` says some seconds later how it ended.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from coordinator.schedulers.partition import WORD, Partition, Wish, allowed_words, first_number
from coordinator.schedulers.scheduler import FORGOTTEN, BatchScheduler, Ending, Job

GONE = re.compile(r"do not exist:[^\S\n]*\n\s*([0-9]{1,20})\b")
ROW = re.compile(r"^ *([0-9]{1,20}) +[\d.]+ +\S+ +\S+ +([A-Za-z]{1,6}) ", re.MULTILINE)
ON_ONE_HOST = "$pe_slots"
"""`allocation_rule` of sge_pe(5) that keeps all slots of a job on one host."""
FLUSHED_SECONDS = 30
"""Grid engine writes its accounting file every 15 seconds unless the site chose otherwise."""


class GridEngine(BatchScheduler):
    """Names no state for an end: that it does not know the id is the only one."""

    name, title, program = "gridengine", "grid engine", "qsub"
    connector = "coordinator.streamflow_plugin.shell_queue:ShellQueue"
    output_file = "crossfed-job.log"
    terminal = frozenset()
    silent = (
        "unable to send message to qmaster",
        "unable to contact qmaster",
        "commlib error",
        "failed receiving gdi request",
        "can't find connection",
    )
    trial = "qsub -w v -cwd"
    trial_advice = (
        "compare `-pe`, `-l` and h_rt of the template with the queue; `qconf -sc` lists the resources: of one with "
        "consumable YES each slot of `-pe` takes as much as `-l` asks for, with JOB the whole job does"
    )
    survey = (
        "qconf -sql && qconf -spl && qhost && qstat -g c && for queue in $(qconf -sql); do qconf -sq $queue; done && "
        'for pe in $(qconf -spl); do qconf -sp "$pe"; done'
    )
    advice = (
        (r"E.*", "it could not be started: `qstat -j {id}` shows the error; fix it, then `qmod -cj {id}` there"),
        (r"h.*", "it is held: `qrls {id}` there, or a job it depends on must end first"),
    )

    def submission(self, name: str, output: str) -> str:
        """`-cwd`: whatever else the job leaves (a relative output, `NAME.poID`) lies there and not in $HOME."""
        return f"qsub -terse -cwd -N {shlex.quote(name)} -j y -o {shlex.quote(output)}"

    def listing(self, name: str) -> str:
        read = '/^ *[0-9]+ /{id=$1; state=$5} $1=="Full" && $3==name {print id, state}'
        return f'jobs=$(qstat -u "$(id -un)" -r) && printf "%s\\n" "$jobs" | awk -v name={name} {shlex.quote(read)}'

    def cancel(self, name: str) -> str:
        return self._cancel(name, "1")

    def cancel_waiting(self, name: str) -> str:
        return self._cancel(name, "$2 ~ /q/")

    def _cancel(self, name: str, which: str) -> str:
        chosen = shlex.quote(f"{which} {{print $1}}")
        ids = f'ids=$({self.listing(name)}) && ids=$(printf "%s\\n" "$ids" | awk {chosen})'
        return f'{ids} && {{ [ -z "$ids" ] || qdel $ids; }}'

    def cancel_ids(self, ids: Sequence[str]) -> str:
        return f"qdel {' '.join(ids)}"

    def is_answer(self, text: str, code: int) -> bool:
        """`qdel` fails for a job that ended meanwhile, which is as good."""
        return code == 0 or "does not exist" in text

    def read_listing(self, text: str) -> list[Job]:
        rows = re.findall(r"^([0-9]{1,20}) ([A-Za-z]{1,6})$", text, re.MULTILINE)
        return [Job(id=id, state=state, began=self.has_begun(state), reason=_reason(state)) for id, state in rows]

    def has_begun(self, state: str) -> bool:
        """Every state of a waiting job has a q: qw, hqw, Eqw, Rq (qstat(1), "state")."""
        return "q" not in state

    def limit_runs(self, state: str) -> bool:
        """Not while it is suspended, by hand (s), by its queue (S) or by a threshold (T)."""
        return super().limit_runs(state) and not set(state) & set("sST")

    def query(self, ids: Sequence[str]) -> str:
        each = f'for id in {" ".join(ids)}; do qstat -j "$id" 2>&1 | grep -A 1 "do not exist:"; done; true'
        return f'qstat -u "$(id -un)" && {{ {each}; }}'

    def read_states(self, text: str, code: int, ids: Sequence[str]) -> dict[str, str]:
        if code != 0:
            return {}
        named = dict.fromkeys(GONE.findall(text), FORGOTTEN) | dict(ROW.findall(text))
        return {one: named[one] for one in ids if one in named}

    def query_ending(self, id: str) -> str:
        """Asks until accounting has it, as long as that may take; a job that never began is never in it."""
        tries = f"for try in $(seq {FLUSHED_SECONDS // 3}); do qacct -j {id} 2>/dev/null && break; sleep 3; done"
        return f"qstat -j {id} 2>&1 | grep -A 1 'do not exist:' && {{ {tries}; true; }}"

    def read_ending(self, text: str, code: int, id: str) -> Ending | None:
        if code != 0 or id not in GONE.findall(text):
            return None
        named = re.findall(r"^(jobnumber|failed|exit_status) +(\S.*)$", text, re.MULTILINE)
        fields = {name: value.rstrip() for name, value in named}
        if fields.get("jobnumber") != id or "exit_status" not in fields:
            return Ending(state=FORGOTTEN, code=None, detail="grid engine has no account of it: it never began")
        returned, failed = first_number(fields["exit_status"]), fields.get("failed", "0")
        by_itself = failed.split()[:1] == ["0"]
        detail = f"exit status {fields['exit_status']}" + ("" if by_itself else f", failed {failed}")
        return Ending(state="ended", code=returned if by_itself else None, detail=detail)

    def read_partitions(self, text: str) -> list[Partition]:
        """Queues with their slots; a parallel environment is what a job with several slots names."""
        environments = [name for name, rule in _rules(text).items() if rule == ON_ONE_HOST]
        cores = [first_number(count) for count in re.findall(r"^\S+ +(?:lx|ul)\S* +(\d+) ", text, re.MULTILINE)]
        found = []
        for part in re.split(r"^qname +", text, flags=re.MULTILINE)[1:]:
            name = part.split()[0] if part.split() else ""
            offered = re.search(r"^pe_list +(.*)$", part, re.MULTILINE)
            slots = re.search(r"^slots +(\d+)", part, re.MULTILINE)
            limit = re.search(r"^h_rt +(\d{1,6}):(\d\d):\d\d", part, re.MULTILINE)
            usable = [pe for pe in allowed_words(offered[1]) if pe in environments] if offered else []
            if WORD.fullmatch(name):
                found.append(
                    Partition(
                        name=name,
                        open=bool(usable),
                        nodes=len(cores),
                        cores=first_number(slots[1]) if slots else 0,
                        hours=round(int(limit[1]) + int(limit[2]) / 60, 2) if limit else 0.0,
                        environment=usable[0] if usable else "",
                    )
                )
        return found

    def refusal(self, text: str, job: str) -> str:
        """A job of several hosts: one whose parallel environment does not keep its slots on one."""
        rules = _rules(text)
        asked = re.search(r"^#\$\s+-pe\s+(\S+)\s+(\d+)", job, re.MULTILINE)
        if asked is None or rules.get(asked[1]) in (ON_ONE_HOST, asked[2]):
            return ""
        usable = ", ".join(name for name, rule in rules.items() if rule == ON_ONE_HOST) or "none"
        if asked[1] not in rules:
            return f"there is no parallel environment {asked[1]!r}; those that keep a job on one host: {usable}"
        return (
            f"parallel environment {asked[1]!r} spreads a job over hosts (allocation_rule {rules[asked[1]]}), and jobs "
            f"of several hosts are not supported under grid engine; those that keep a job on one host: {usable}"
        )

    def blocks(self, wish: Wish) -> dict[str, str]:
        return {
            "account": f"#$ -P {wish.account}" if wish.account else "",
            "queue": f"#$ -q {wish.partition}",
            "resources": f"#$ -pe {wish.environment or 'smp'} {wish.cores}"
            + (f"\n#$ -l gpu={wish.gpus}" if wish.gpus else ""),
            "limit": f"#$ -l h_rt={wish.clock}",
        }


def _rules(text: str) -> dict[str, str]:
    """How each parallel environment spreads a job's slots over hosts."""
    return dict(re.findall(r"^pe_name +(\S+)\n(?:(?!pe_name).*\n)*?allocation_rule +(\S+)", text, re.MULTILINE))


def _reason(state: str) -> str:
    """Why it waits, as far as its state shows."""
    return state if "q" in state and ("E" in state or "h" in state) else ""


SCHEDULER = GridEngine()
