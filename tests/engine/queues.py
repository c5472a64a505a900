"""Stand-ins for the commands of PBS and Flux, for machines without their servers: a job is a process on this machine.

They speak as the manuals say and as StreamFlow asks: `qsub -` from standard input, `qstat IDS -xf -Fjson`, `flux batch`,
`flux jobs`. What they cannot show is a real queue: waiting, limits, several nodes.
"""

from __future__ import annotations

from pathlib import Path

QSUB = r"""#!/bin/bash
# qsub: the script comes on standard input; prints the job's name; runs it in the home directory, as PBS does
cd "$HOME"; out=$(mktemp -u pbs.XXXXXX)
while [ $# -gt 0 ]; do case "$1" in -o) out=$2; shift 2 ;; -) shift ;; -*) shift 2 ;; *) shift ;; esac; done
number=$(( $(cat "$QUEUE/last" 2>/dev/null || echo 100) + 1 )); echo "$number" > "$QUEUE/last"; id=$number.stand-in
cat > "$QUEUE/$id.script"; hostname > "$QUEUE/$id.nodes"; echo "$*" > "$QUEUE/$id.arguments"
( PBS_JOBID=$id PBS_NODEFILE=$QUEUE/$id.nodes PBS_ENVIRONMENT=PBS_BATCH bash "$QUEUE/$id.script" > "$HOME/$out" 2>&1
  echo $? > "$QUEUE/$id.status" ) < /dev/null > /dev/null 2>&1 &
echo "$HOME/$out" > "$QUEUE/$id.output"; echo "$id"
"""
QSTAT = r"""#!/bin/bash
# qstat IDS -xf -Fjson
jobs=
for id in "$@"; do case "$id" in -*) continue ;; esac
  state=R status=; if [ -f "$QUEUE/$id.status" ]; then state=F status=", \"Exit_status\": $(cat "$QUEUE/$id.status")"; fi
  jobs+="${jobs:+,} \"$id\": {\"job_state\": \"$state\", \"Output_Path\": \"host:$(cat "$QUEUE/$id.output")\"$status}"
done
echo "{\"Jobs\": {$jobs}}"
"""
PBSDSH = r"""#!/bin/bash
# pbsdsh -- PROGRAM ARGUMENTS: one task for each line of the node file, with PBS's own variables only
[ "$1" = -- ] && shift
exec env -i HOME="$HOME" PATH=/usr/bin:/bin PBS_JOBID="$PBS_JOBID" PBS_VNODENUM=0 PBS_NODENUM=0 "$@"
"""
FLUX = r"""#!/bin/bash
verb=$1; shift
case "$verb" in
batch)
  cwd=$PWD; for word in "$@"; do case "$word" in --cwd=*) cwd=${word#--cwd=} ;; esac; done
  id=f$(( $(cat "$QUEUE/last" 2>/dev/null || echo 0) + 1 )); echo "${id#f}" > "$QUEUE/last"; cat > "$QUEUE/$id.script"; echo "$*" > "$QUEUE/$id.arguments"
  ( cd "$cwd"; FLUX_JOB_ID=$id FLUX_JOB_SIZE=1 FLUX_JOB_NNODES=1 bash "$QUEUE/$id.script" > "$QUEUE/$id.out" 2>&1; echo $? > "$QUEUE/$id.status" ) < /dev/null > /dev/null 2>&1 &
  echo "$id" ;;
jobs) case "$*" in
  *returncode*) cat "$QUEUE/${!#}.status" ;;
  *) for script in "$QUEUE"/*.script; do id=$(basename "$script" .script); [ -f "$QUEUE/$id.status" ] || echo "$id"; done ;; esac ;;
job) [ "$1" = attach ] && cat "$QUEUE/$2.out" ;;
hostlist) hostname ;;
resource) echo 1 ;;
run) while [ "${1#--}" != "$1" ]; do shift; done; FLUX_TASK_RANK=0 FLUX_TASK_LOCAL_ID=0 exec "$@" ;;
esac
"""


def install(folder: Path) -> Path:
    """Write the commands to `folder`; returns it. They keep their jobs in $QUEUE."""
    folder.mkdir(parents=True)
    for name, text in {"qsub": QSUB, "qstat": QSTAT, "pbsdsh": PBSDSH, "flux": FLUX, "qdel": "#!/bin/bash\n"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder
