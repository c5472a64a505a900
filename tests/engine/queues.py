"""Stand-ins for the commands of PBS and Flux, for machines without their servers: a job is a process on this machine.

They answer as OpenPBS and Flux were recorded to (`tests/schedulers/recorded`): the server keeps no history of ended
jobs, pbsdsh exits with 0 and prints the codes of its tasks. What they cannot show is a real queue: waiting, limits,
several nodes.
"""

from __future__ import annotations

from pathlib import Path

QSUB = r"""#!/bin/bash
# qsub: the script comes on standard input; prints the job's name; runs it in the home directory, as PBS does
cd "$HOME"; out=$HOME/STDIN.o
while [ $# -gt 0 ]; do case "$1" in -o) out=$2; shift 2 ;; -) shift ;; -*) shift 2 ;; *) shift ;; esac; done
number=$(( $(cat "$QUEUE/last" 2>/dev/null || echo 100) + 1 )); echo "$number" > "$QUEUE/last"; id=$number.stand-in
cat > "$QUEUE/$id.script"; hostname > "$QUEUE/$id.nodes"; echo "$*" > "$QUEUE/$id.arguments"
( PBS_JOBID=$id PBS_NODEFILE=$QUEUE/$id.nodes PBS_ENVIRONMENT=PBS_BATCH bash "$QUEUE/$id.script" > "$out" 2>&1
  echo $? > "$QUEUE/$id.status" ) < /dev/null > /dev/null 2>&1 &
echo "$out" > "$QUEUE/$id.output"; echo "$id"
"""
QSELECT = r"""#!/bin/bash
# qselect -u USER -N NAME [-s STATES]: ids that have not ended; none of ours ever waits
case "$*" in *" -s "*) exit 0 ;; esac
for script in "$QUEUE"/*.script; do
  id=$(basename "$script" .script); [ -e "$script" ] && [ ! -f "$QUEUE/$id.status" ] && echo "$id"
done
exit 0
"""
QSTAT = r"""#!/bin/bash
# qstat -f -Fjson IDS, of a server as it is installed: no history (tests/schedulers/recorded/pbs-qstat-*nohistory*)
jobs= code=0 history=
for id in "$@"; do case "$id" in -x*) history=asked; continue ;; -*|json) continue ;; esac
  if [ $history ]; then echo "qstat: PBS is not configured to maintain job history $id" >&2
  elif [ -f "$QUEUE/$id.status" ]; then echo "qstat: Unknown Job Id $id" >&2; code=153
  else jobs+="${jobs:+,} \"$id\": {\"job_state\": \"R\", \"Output_Path\": \"host:$(cat "$QUEUE/$id.output")\"}"; fi
done
echo "{\"pbs_version\": \"23.06.06\"${jobs:+, \"Jobs\": {$jobs\}}}"; exit $code
"""
PBSDSH = r"""#!/bin/bash
# pbsdsh -- PROGRAM ARGUMENTS: one task for each line of the node file, with PBS's own variables only
[ "$1" = -- ] && shift
env -i HOME="$HOME" PATH=/usr/bin:/bin PBS_JOBID="$PBS_JOBID" PBS_NODENUM=0 PBS_TASKNUM=00000002 "$@"
code=$?; [ $code = 0 ] || echo "pbsdsh: task 0x00000000 exit status $code"; exit 0
"""
FLUX = r"""#!/bin/bash
verb=$1; shift
case "$verb" in
batch)
  cwd=$PWD; for word in "$@"; do case "$word" in --cwd=*) cwd=${word#--cwd=} ;; esac; done
  id=f$(( $(cat "$QUEUE/last" 2>/dev/null || echo 0) + 1 )); echo "${id#f}" > "$QUEUE/last"
  cat > "$QUEUE/$id.script"; echo "$*" > "$QUEUE/$id.arguments"
  ( cd "$cwd"
    FLUX_JOB_ID=$id FLUX_JOB_SIZE=1 FLUX_JOB_NNODES=1 bash "$QUEUE/$id.script" > "$QUEUE/$id.out" 2>&1
    echo $? > "$QUEUE/$id.status" ) < /dev/null > /dev/null 2>&1 &
  echo "$id" ;;
jobs) case "$*" in
  *returncode*) id=${!#}; status=$(cat "$QUEUE/$id.status" 2>/dev/null)
    if [ -z "$status" ]; then echo "$id  RUN RUN"
    elif [ "$status" = 0 ]; then echo "$id 0 COMPLETED COMPLETED"
    else echo "$id $status FAILED FAILED"; fi ;;
  *) for script in "$QUEUE"/*.script; do
      id=$(basename "$script" .script)
      [ -e "$script" ] && [ ! -f "$QUEUE/$id.status" ] && echo "$id RUN urgency=16 queue= "
    done
    exit 0 ;; esac ;;
queue) printf 'Job submission is enabled\nScheduling is started\n' ;;
hostlist) hostname ;;
resource) echo 1 ;;
run) while [ "${1#--}" != "$1" ]; do shift; done; FLUX_TASK_RANK=0 FLUX_TASK_LOCAL_ID=0 exec "$@" ;;
esac
"""


def install(folder: Path) -> Path:
    """Write the commands to `folder`; returns it. They keep their jobs in $QUEUE."""
    folder.mkdir(parents=True)
    for name, text in {
        "qsub": QSUB,
        "qstat": QSTAT,
        "qselect": QSELECT,
        "pbsdsh": PBSDSH,
        "flux": FLUX,
        "qdel": "#!/bin/bash\n",
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder
