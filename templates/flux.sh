{# https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man1/flux-batch.html -#}
#!/bin/bash
# Any Flux site: the batch script is a Flux instance of its own; one task a node starts a rank for each GPU.
{% block account %}
#flux: --bank=<bank>
{% endblock %}
{% block queue %}
#flux: --queue=<queue>
{% endblock %}
#flux: --nodes=1
#flux: --exclusive
{% block limit %}
#flux: --time-limit=2h
{% endblock %}
#flux: --signal=SIGUSR1@300s
exec >crossfed-job.log 2>&1 # StreamFlow takes what a Flux job prints for the path of a file
. '<home>/env.sh'
export CROSSFED_HOSTS="$(flux hostlist --expand --delimiter=, instance)"
IFS= read -r -d '' command <<'CROSSFED' || true
trap : USR1 TERM
{{ streamflow_command }}
CROSSFED
flux run --nodes="$(flux resource list -no {nnodes})" --tasks-per-node=1 --exclusive bash -c "$command"
