"""Does the facility's queue take the job? Asked of the scheduler itself, without submitting anything."""

from __future__ import annotations

import re
import shlex

from coordinator.config.deployments import Deployment
from coordinator.preflight.remote import Answer, run_there
from coordinator.preflight.row import Row, fail, ok, warning
from coordinator.preflight.submission import try_job
from coordinator.schedulers.directives import find_directive, gpus_asked, hours_asked, nodes_asked
from coordinator.schedulers.flux import lines_of, queue_rows
from coordinator.schedulers.registry import scheduler_named
from coordinator.schedulers.scheduler import BatchScheduler
from facility.exchange.messages.strict_json import clean_text
from facility.exchange.messages.template_inheritance import script_of

SBATCH_REFUSES = (
    (
        "invalid partition",
        "the partition is not one of this cluster's",
        "correct `fill: {partition: ...}` or the template; `sinfo -s` lists them",
    ),
    (
        "invalid account",
        "the account may not use this partition",
        "correct `fill: {account: ...}`; `sacctmgr show assoc user=$USER` lists yours",
    ),
    (
        "invalid qos",
        "the QoS is not one that the account may use",
        "correct the QoS; `sacctmgr show assoc user=$USER format=qos` lists yours",
    ),
    (
        "accounting/qos policy",
        "a limit of the account or its QoS refuses the job: how many jobs it may have, their size, time or budget",
        "`sacctmgr show assoc user=$USER` and `sacctmgr show qos` show the limits; `squeue -u $USER` lists your jobs",
    ),
    (
        "time limit",
        "the time asked for is more than the partition allows",
        "lower `options: {time: ...}` or the template's --time; `sinfo -o '%P %l'` shows the limits",
    ),
    (
        "node configuration is not available",
        "no node of the partition that is up has what the template asks for",
        "compare nodes, cores, GPUs and memory with `sinfo -o '%P %T %D %c %m %G'`; nodes that are drained or down do "
        "not count",
    ),
    (
        "memory specification",
        "the memory asked for is more than a node has",
        "lower the template's --mem; `sinfo -o '%P %m'` shows what nodes have",
    ),
    (
        "invalid generic resource",
        "the GPUs are not asked for as this cluster names them",
        "compare the template's GPU line with `sinfo -o '%P %G'`",
    ),
    (
        "unable to contact slurm controller",
        "the Slurm controller does not answer",
        "wait, or ask the site: slurmctld may be down for maintenance",
    ),
    ("unrecognized option", "sbatch does not know an option", "remove it from the template or from `options:`"),
)
"""Words of sbatch, what they mean, and what to do."""


SEVERAL = re.compile(
    r"^#(?:SBATCH(?:[ \t].*)?[ \t](?:--(?:array|clusters)(?![\w-])|-[aM])"
    r"|PBS(?:[ \t].*)?[ \t]-J|\$(?:[ \t].*)?[ \t]-t(?![\w-])).*",
    re.MULTILINE,
)
"""Directives by which one submission is several jobs, or one of another cluster: neither is found by its id."""


def check_scheduler(name: str, deployment: Deployment, template: str, *, submit: bool) -> list[Row]:
    """The command is there, and partition, account and limits are accepted. `template`: the filled job template.

    `submit`: a real job shows it where the scheduler has no dry run.
    """
    command = _batch(deployment).program
    answer = run_there(deployment, f"command -v {command}\n")
    if answer.code != 0:
        return [
            fail(
                name,
                "scheduler",
                f"there is no {command} command at {deployment.host or 'this machine'}",
                f"is `type: {deployment.type}` right, and `host:` a login node? some sites want a module loaded in "
                "~/.bash_profile for it",
            )
        ]
    rows = [ok(name, "scheduler", answer.out.strip().splitlines()[-1])]
    job = script_of(template, "sleep 1")
    if found := SEVERAL.search(job):
        fix = "remove it from the template; for another cluster, name a login node of that as `host:`"
        said = f"`{found[0]}` makes several jobs, or one of another cluster, but a round is one job of this one"
        return [*rows, fail(name, "job accepted", said, fix)]
    ask = {"slurm": _slurm, "pbs": _pbs, "flux": _flux}.get(deployment.type, _other)
    rows.append(ask(name, deployment, job))
    if submit and not _batch(deployment).trial and rows[-1].verdict != "fail":
        rows.append(try_job(name, deployment, _batch(deployment), job))
    return rows


def _slurm(name: str, deployment: Deployment, job: str) -> Row:
    """`sbatch --test-only` checks everything and submits nothing (https://slurm.schedmd.com/sbatch.html)."""
    given = deployment.options.items()
    options = [f"--{_dashed(key)}={value}" for key, value in given if not isinstance(value, bool)]  # 1 is not a flag
    options += [f"--{_dashed(key)}" for key, value in given if value is True]
    script = f"{_batch(deployment).trial} {shlex.join(options)} <<'CROSSFED_JOB' 2>&1\n{job}\nCROSSFED_JOB\n"
    answer = run_there(deployment, script, seconds=60)
    said = _last(answer, "sbatch")
    if answer.code == 0:
        return _partition(name, deployment, job, said) or ok(
            name, "job accepted", said or "sbatch --test-only accepts it"
        )
    for mark, found, fix in SBATCH_REFUSES:
        lines = [line for line in (answer.out + answer.error).splitlines() if mark in line.lower()]
        if lines:  # the last line may be advice to read --help
            said = clean_text(lines[-1].strip().removeprefix("sbatch: "), 300)
            return fail(name, "job accepted", f"{found} (sbatch: {said})", fix)
    return fail(
        name,
        "job accepted",
        f"sbatch --test-only refuses the job: {said}",
        "correct the template or `options:`; the words are Slurm's",
    )


def _partition(name: str, deployment: Deployment, job: str, said: str) -> Row | None:
    """Why the partition that sbatch names would take the job and not start it; None where it would, or sinfo is silent.

    sbatch accepts a job for a partition that is down, and one that asks for more time than its partition allows
    (unless the site sets EnforcePartLimits): it then waits for ever. A QoS may lift it (its flag PartitionTimeLimit).
    """
    partition = re.search(r"in partition (\S+)$", said)
    if partition is None:
        return None
    shown = clean_text(partition[1], 60)
    answer = run_there(deployment, f"sinfo -h -p {shlex.quote(partition[1])} -o '%a %l'\n")
    lines = [line.split() for line in answer.out.splitlines() if len(line.split()) == 2] if answer.code == 0 else []
    if any(state == "down" for state, _ in lines):
        return warning(
            name,
            "job accepted",
            f"partition {shown} is down: it takes jobs, and starts none until the site brings it up",
            "wait for the site, or name another in `fill: {partition: ...}` or the template; `sinfo -s` lists them",
        )
    hours = wanted_hours(deployment, job)
    for _, text in lines:
        limit = hours_asked({"time": text}, "")  # 0 for `infinite` and `n/a`
        if 0 < limit < hours:
            qos = deployment.options.get("qos") or find_directive(job, r"#SBATCH.* (?:--qos[= ]|-q ?)(\S+)")
            return (warning if qos else fail)(
                name,
                "job accepted",
                f"the job asks for {hours:g} h, partition {shown} starts none above {limit:g} h: Slurm would "
                "take it and never start it" + (", unless the QoS lifts the limit" if qos else ""),
                "lower `options: {time: ...}` or the template's --time; `sinfo -o '%P %l'` shows the limits",
            )
    return None


def _pbs(name: str, deployment: Deployment, job: str) -> Row:
    """PBS has no dry run; the queue can be asked after, and whether it is open."""
    queue = deployment.options.get("destination") or find_directive(job, r"#PBS.* -q ?(\S+)")
    if not queue:
        return warning(
            name,
            "job accepted",
            "the template names no queue, so PBS will choose",
            "name one by #PBS -q to have it checked",
        )
    answer = run_there(deployment, f"qstat -Qf {shlex.quote(str(queue))} 2>&1\n")
    if answer.code != 0:
        return fail(
            name,
            "job accepted",
            f"there is no PBS queue {queue!r} ({_last(answer, 'qstat')})",
            "correct `fill: {queue: ...}`; `qstat -Q` lists them",
        )
    closed = [word for word in ("enabled", "started") if re.search(rf"{word}\s*=\s*False", answer.out)]
    if closed:
        return fail(
            name,
            "job accepted",
            f"PBS queue {queue!r} is not {' and not '.join(closed)}",
            "choose another queue, or wait until the site opens it",
        )
    wanted = wanted_nodes(deployment, job)[1]
    nodes = run_there(deployment, "pbsnodes -a 2>/dev/null\n").out if wanted else ""
    most = max((int(count) for count in re.findall(r"resources_available\.ngpus = (\d+)", nodes)), default=0)
    if nodes and wanted > most:
        has = f"at most {most}" if most else "no resource ngpus at all"
        return fail(
            name,
            "job accepted",
            f"the job asks for {wanted} GPUs a node (ngpus), PBS has {has}",
            "correct `select=` in the template; `pbsnodes -a` shows resources_available of each node",
        )
    return ok(
        name, "job accepted", f"queue {queue} is enabled and started (PBS cannot test a job without submitting it)"
    )


def _other(name: str, deployment: Deployment, job: str) -> Row:
    """Any scheduler: the queue that the template names is one of those it lists as open, and its dry run, where it has
    one, finds a place for the job."""
    queue, named = _batch(deployment), find_directive(job, r"#\$.* -q (\S+)")
    answer = run_there(deployment, queue.survey + "\n")
    if answer.code != 0:
        said = _last(answer, queue.program)
        return fail(name, "job accepted", f"{queue.title} does not list its queues: {said}", "wait, or ask the site")
    usable = [one.name for one in queue.read_partitions(answer.out) if one.open]
    if named and named not in usable:
        return fail(
            name,
            "job accepted",
            f"{queue.title} has no open queue {named!r} with a parallel environment on one host",
            f"correct `fill: {{queue: ...}}`; open are {', '.join(usable) or 'none'}",
        )
    if refused := queue.refusal(answer.out, job):
        return fail(name, "job accepted", refused, "correct `-pe` in the template or in its `resources` block")
    if not queue.trial:
        return ok(
            name, "job accepted", f"{queue.title} lists the queue as open (it cannot test a job without submitting it)"
        )
    tried = run_there(deployment, f"{queue.trial} <<'CROSSFED_JOB' 2>&1\n{job}\nCROSSFED_JOB\n", seconds=60)
    said = clean_text("; ".join(line for line in tried.out.splitlines() if line.strip()), 300)
    if tried.code == 0:
        return ok(name, "job accepted", f"{queue.trial}: {said}")
    if queue.is_silence(tried.out + tried.error):
        return fail(name, "job accepted", f"{queue.title} does not answer: {said}", "wait, or ask the site")
    return fail(name, "job accepted", f"{queue.title} has no place for the job: {said}", queue.trial_advice)


def _batch(deployment: Deployment) -> BatchScheduler:
    found = scheduler_named(deployment.type)
    assert isinstance(found, BatchScheduler)
    return found


def _flux(name: str, deployment: Deployment, job: str) -> Row:
    """`flux batch --dry-run` asks no server, so the queues and resources are asked after."""
    wanted = deployment.options.get("queue") or find_directive(job, r" (?:--queue[= ]|-q ?)(\S+)")
    answer = run_there(deployment, f"{_batch(deployment).survey}\n")
    if answer.code != 0:
        return fail(
            name,
            "job accepted",
            f"Flux does not list its queues: {_last(answer, 'flux')}",
            "wait, or ask the site: its Flux instance may be down",
        )
    problem, fix = flux_refusal(answer.out, str(wanted), wanted_nodes(deployment, job)[0])
    if problem:
        return fail(name, "job accepted", problem, fix)
    queue = f"queue {wanted} is" if wanted else "submission and scheduling are"
    return ok(name, "job accepted", f"{queue} enabled and started (Flux cannot test a job without submitting it)")


def flux_refusal(text: str, queue: str, nodes: int) -> tuple[str, str]:
    """Why Flux would not start a job in `queue`, and what to do, from `flux queue list`, `flux queue status` and
    `flux resource list` one after the other; '' and '' when nothing speaks against it."""
    lines = lines_of(text)
    rows = [line.split() for line in lines]
    names = [row[0].rstrip("*") for row in queue_rows(rows)]
    if queue and queue not in names:
        known = ", ".join(names) or "none"
        return f"there is no Flux queue {queue!r}", f"correct `fill: {{queue: ...}}`; the queues are {known}"
    own = [line for line in lines if line.startswith(f"{queue}: " if queue else ("Job submission", "Scheduling"))]
    closed = [line.removeprefix(f"{queue}: ") for line in own if "disabled" in line or "stopped" in line]
    if closed:
        return f"Flux queue {queue!r}: {'; '.join(closed)}", "choose another queue, or wait until the site opens it"
    first = next((number for number, row in enumerate(rows) if row[:1] == ["STATE"]), len(rows))
    counted = [row for row in rows[first + 1 :] if len(row) >= 5 and (not queue or queue in row[1].split(","))]
    total = sum(int(next((word for word in row[1:] if word.isdigit()), "0")) for row in counted)
    if counted and nodes > total:
        return (
            f"the job asks for {nodes} nodes, Flux has {total} for it",
            "lower `--nodes`; `flux resource list` shows them",
        )
    return "", ""


def wanted_nodes(deployment: Deployment, template: str) -> tuple[int, int]:
    """Nodes and GPUs a node that the job asks for, as options or directives say; 1 and 0 where they do not."""
    options = deployment.options
    return nodes_asked(options, template) or 1, gpus_asked(options, template)


def wanted_hours(deployment: Deployment, template: str) -> float:
    """Time limit of one job in hours; 0 where nothing says."""
    return hours_asked(deployment.options, template)


def _dashed(name: str) -> str:
    """StreamFlow's `gpusPerNode` as sbatch's `gpus-per-node`."""
    return re.sub(r"[A-Z]+", lambda letters: "-" + letters[0].lower(), name)


def _last(answer: Answer, program: str) -> str:
    lines = [line for line in (answer.out + "\n" + answer.error).splitlines() if line.strip()]
    named = [line for line in lines if program in line]
    return (named or lines or [""])[-1].strip()
