{# https://2022.help.altair.com/2022.1.0/PBS%20Professional/PBSUserGuide2022.1.pdf -#}
#!/bin/bash
# Any OpenPBS or PBS Professional site: pbsdsh starts one task on each chunk; it hands on no environment but PBS's own.
{% block account %}
#PBS -A <account>
{% endblock %}
{% block queue %}
#PBS -q <queue>
{% endblock %}
{% block resources %}
#PBS -l select=1:ncpus=32:ngpus=4
#PBS -l place=scatter:excl
{% endblock %}
{% block limit %}
#PBS -l walltime=02:00:00
{% endblock %}
hosts=$(paste -sd, "$PBS_NODEFILE")
start=$(date +%s)-$$ # another one where PBS runs the job again
IFS= read -r -d '' launch <<'CROSSFED' || true
. '<home>/env.sh'
exec bash -c "$command"
CROSSFED
IFS= read -r -d '' command <<'CROSSFED' || true
trap : USR1 TERM
{{ streamflow_command }}
CROSSFED
set -o pipefail # pbsdsh ends with 0 and prints what its tasks ended with
pbsdsh -- env CROSSFED_HOSTS="$hosts" CROSSFED_START="$start" command="$command" bash -c "$launch" 2>&1 |
    awk '{ print; fflush() } /^pbsdsh: task 0x[0-9a-fA-F]+ exit status [0-9]+$/ && $NF > code { code = $NF }
        END { exit code > 255 ? 1 : code }'
