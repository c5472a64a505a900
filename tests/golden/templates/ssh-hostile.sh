#!/bin/bash
# No queue: the command runs on the host itself, with as many ranks as the facility's settings say
# (`training: {ranks: N}`); the host must be yours for as long as a round takes.
unset SSH_CLIENT SSH2_CLIENT
. '/scratch/it'\''s a "home"; touch pwned $(touch pwned) `touch pwned` ü&|<x>/env.sh'
ulimit -n "$(ulimit -Hn)"
IFS= read -r -d '' command <<'CROSSFED' || true
cd '/tmp/a b' && export X='it'\''s' && python3 -m facility.round --model "$(pwd)/m o" --out update 2>&1
CROSSFED
bash -c "$command"