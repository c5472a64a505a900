#!/bin/bash
# Any Flux site: the batch script is a Flux instance of its own; one task a node starts a rank for each GPU.
#flux: --bank=my-bank
#flux: --queue=my-queue
#flux: --nodes=1
#flux: --exclusive
#flux: --time-limit=2h
#flux: --signal=SIGUSR1@300s
exec >crossfed-job.log 2>&1 # StreamFlow takes what a Flux job prints for the path of a file
unset SSH_CLIENT SSH2_CLIENT
. ''"$HOME"'/crossfed/env.sh'
export CROSSFED_HOSTS="$(flux hostlist --expand --delimiter=, instance)"
IFS= read -r -d '' command <<'CROSSFED' || true
trap : USR1 TERM
cd '/tmp/a b' && export X='it'\''s' && python3 -m facility.round --model "$(pwd)/m o" --out update 2>&1
CROSSFED
flux run --nodes="$(flux resource list -no {nnodes})" --tasks-per-node=1 --exclusive bash -c "$command"