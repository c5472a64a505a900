#!/bin/bash
# Any OpenPBS or PBS Professional site: pbsdsh starts one task on each chunk; it hands on no environment but PBS's own.
#PBS -A my-account
#PBS -q my-queue
#PBS -l select=1:ncpus=32:ngpus=4
#PBS -l place=scatter:excl
#PBS -l walltime=02:00:00
hosts=$(paste -sd, "$PBS_NODEFILE")
IFS= read -r -d '' enter <<'CROSSFED' || true
. '/scratch/it'\''s a "home"; touch pwned $(touch pwned) `touch pwned` ü&|<x>/env.sh'
CROSSFED
IFS= read -r -d '' command <<'CROSSFED' || true
trap : USR1 TERM
cd '/tmp/a b' && export X='it'\''s' && python3 -m facility.round --model "$(pwd)/m o" --out update 2>&1
CROSSFED
command="$enter$command"
pbsdsh -- env CROSSFED_HOSTS="$hosts" bash -c "$command"