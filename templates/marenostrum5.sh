{# https://www.bsc.es/supportkc/docs/MareNostrum5/slurm/ -#}
#!/bin/bash
# MareNostrum 5 ACC: 4 H100 (64 GB) and 80 cores a node; 20 cores are asked for with each GPU.
#SBATCH --account=<account>
#SBATCH --qos=<qos>
#SBATCH --partition=acc
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=80
#SBATCH --exclusive
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
