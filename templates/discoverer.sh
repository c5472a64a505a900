{# https://docs.discoverer.bg/resource_overview.html -#}
#!/bin/bash
# Discoverer+: 8 H200 (141 GB) a DGX node; account and QoS are both the project's name.
#SBATCH --account=<account>
#SBATCH --qos=<qos>
#SBATCH --partition=common
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --signal=USR1@300
. '<home>/env.sh'
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
IFS= read -r -d '' command <<'CROSSFED' || true
trap : USR1 TERM
{{ streamflow_command }}
CROSSFED
srun --kill-on-bad-exit=0 bash -c "$command"
