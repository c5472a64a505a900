{# https://docs.hpc.cineca.it/hpc/leonardo.html -#}
#!/bin/bash
# Leonardo Booster: 4 A100 (64 GB) and 32 cores a node, two InfiniBand HDR cards.
#SBATCH --account=<account>
#SBATCH --partition=boost_usr_prod
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --mem=494000
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --signal=USR1@300
. '<home>/env.sh'
ulimit -n "$(ulimit -Hn)"
export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0 NCCL_IB_TIMEOUT=22
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
IFS= read -r -d '' command <<'CROSSFED' || true
trap : USR1 TERM
{{ streamflow_command }}
CROSSFED
srun --kill-on-bad-exit=0 bash -c "$command"
