{# https://2022.help.altair.com/2022.1.0/PBS%20Professional/PBSUserGuide2022.1.pdf -#}
#!/bin/bash
# Any OpenPBS or PBS Professional site: pbsdsh starts one task on each chunk; it hands on no environment but PBS's own.
#PBS -A <account>
#PBS -q <queue>
#PBS -l select=1:ncpus=32:ngpus=4
#PBS -l place=scatter:excl
#PBS -l walltime=02:00:00
hosts=$(paste -sd, "$PBS_NODEFILE")
IFS= read -r -d '' enter <<'CROSSFED' || true
. '<home>/env.sh'
CROSSFED
IFS= read -r -d '' command <<'CROSSFED' || true
trap : USR1 TERM
{{ streamflow_command }}
CROSSFED
command="$enter$command"
pbsdsh -- env CROSSFED_HOSTS="$hosts" bash -c "$command"
