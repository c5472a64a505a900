{# https://slurm.schedmd.com/sbatch.html -#}
#!/bin/bash
{% block about %}
# Any Slurm site: one task a node starts a rank for each GPU.
{% endblock %}
{% block account %}
#SBATCH --account=<account>
{% endblock %}
{% block partition %}
#SBATCH --partition=<partition>
{% endblock %}
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
{% block resources %}
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --mem=0
#SBATCH --exclusive
{% endblock %}
{% block limit %}
#SBATCH --time=02:00:00
{% endblock %}
#SBATCH --signal=USR1@300
. '<home>/env.sh'
{% block environment %}
{% endblock %}
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
IFS= read -r -d '' command <<'CROSSFED' || true
trap : USR1 TERM
{{ streamflow_command }}
CROSSFED
srun --kill-on-bad-exit=0 bash -c "$command"
