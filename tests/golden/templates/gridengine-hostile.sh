#!/bin/bash
# Any grid engine site: one node; `smp` is a parallel environment that keeps a job's slots on one host.
#$ -S /bin/bash
#$ -P my-account
#$ -q my-queue
#$ -pe smp 32
#$ -l gpu=4
#$ -l h_rt=02:00:00
#$ -notify
trap : USR1 USR2
unset SSH_CLIENT SSH2_CLIENT
. '/scratch/it'\''s a "home"; touch pwned $(touch pwned) `touch pwned` ü&|<x>/env.sh'
IFS= read -r -d '' command <<'CROSSFED' || true
trap : USR1 USR2 TERM
cd '/tmp/a b' && export X='it'\''s' && python3 -m facility.round --model "$(pwd)/m o" --out update 2>&1
CROSSFED
bash -c "$command"