{# https://docs.macc.fccn.pt/deucalion/ -#}
#!/bin/bash
# Deucalion GPU: 4 A100 (40 GB; partition normal-a100-80: 80 GB) and 128 cores a node.
#SBATCH --account=<account>
#SBATCH --partition=normal-a100-40
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=128
#SBATCH --mem=0
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
