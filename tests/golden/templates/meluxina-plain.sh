#!/bin/bash
# MeluXina GPU: 4 A100 (40 GB) and 64 cores a node; whole nodes only.
#SBATCH --account=my-account
#SBATCH --partition=gpu
#SBATCH --qos=default
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=64
#SBATCH --time=02:00:00
#SBATCH --signal=USR1@300
unset SSH_CLIENT SSH2_CLIENT
. ''"$HOME"'/crossfed/env.sh'
export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
IFS= read -r -d '' command <<'CROSSFED' || true
trap : USR1 TERM
cd '/tmp/a b' && export X='it'\''s' && python3 -m facility.round --model "$(pwd)/m o" --out update 2>&1
CROSSFED
srun --kill-on-bad-exit=0 bash -c "$command"