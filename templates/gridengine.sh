{# https://gridscheduler.sourceforge.net/htmlman/htmlman1/qsub.html -#}
#!/bin/bash
# Any grid engine site: one node; `smp` is a parallel environment that keeps a job's slots on one host.
#$ -S /bin/bash
{% block account %}
#$ -P <account>
{% endblock %}
{% block queue %}
#$ -q <queue>
{% endblock %}
{% block resources %}
#$ -pe smp 32
#$ -l gpu=4
{% endblock %}
{% block limit %}
#$ -l h_rt=02:00:00
{% endblock %}
#$ -notify
trap : USR1 USR2
. '<home>/env.sh'
IFS= read -r -d '' command <<'CROSSFED' || true
trap : USR1 USR2 TERM
{{ streamflow_command }}
CROSSFED
bash -c "$command"
