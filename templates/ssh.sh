{# https://man.openbsd.org/ssh -#}
#!/bin/bash
# No queue: the command runs on the host itself, with as many ranks as the facility's settings say
# (`training: {ranks: N}`); the host must be yours for as long as a round takes.
. '<home>/env.sh'
ulimit -n "$(ulimit -Hn)"
IFS= read -r -d '' command <<'CROSSFED' || true
{{ streamflow_command }}
CROSSFED
bash -c "$command"
