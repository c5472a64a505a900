{# https://docs.lxp.lu/first-steps/handling_jobs/ -#}
#!/bin/bash
# MeluXina GPU: 4 A100 (40 GB) and 64 cores a node; whole nodes only.
#SBATCH --account=<account>
#SBATCH --partition=gpu
#SBATCH --qos=default
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=64
#SBATCH --time=02:00:00
#SBATCH --signal=USR1@300
. '<home>/env.sh'
export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
IFS= read -r -d '' command <<'CROSSFED' || true
trap : USR1 TERM
{{ streamflow_command }}
CROSSFED
srun --kill-on-bad-exit=0 bash -c "$command"
