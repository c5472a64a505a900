#!/bin/bash
# Any OpenPBS or PBS Professional site: pbsdsh starts one task on each chunk; it hands on no environment but PBS's own.
#PBS -A my-account
#PBS -q my-queue
#PBS -l select=1:ncpus=32:ngpus=4
#PBS -l place=scatter:excl
#PBS -l walltime=02:00:00
hosts=$(paste -sd, "$PBS_NODEFILE")
start=$(date +%s)-$$ # another one where PBS runs the job again
IFS= read -r -d '' launch <<'CROSSFED' || true
unset SSH_CLIENT SSH2_CLIENT
. ''"$HOME"'/crossfed/env.sh'
exec bash -c "$command"
CROSSFED
IFS= read -r -d '' command <<'CROSSFED' || true
trap : USR1 TERM
cd '/tmp/a b' && export X='it'\''s' && python3 -m facility.round --model "$(pwd)/m o" --out update 2>&1
CROSSFED
set -o pipefail # pbsdsh ends with 0 and prints what its tasks ended with
pbsdsh -- env CROSSFED_HOSTS="$hosts" CROSSFED_START="$start" command="$command" bash -c "$launch" 2>&1 |
    awk '{ print; fflush() } /^pbsdsh: task 0x[0-9a-fA-F]+ exit status [0-9]+$/ && $NF > code { code = $NF }
        END { exit code > 255 ? 1 : code }'