#!/bin/bash
# Deucalion GPU: 4 A100 (40 GB; partition normal-a100-80: 80 GB) and 128 cores a node.
#SBATCH --account=my-account
#SBATCH --partition=normal-a100-40
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=128
#SBATCH --mem=0
#SBATCH --time=02:00:00
#SBATCH --signal=USR1@300
unset SSH_CLIENT SSH2_CLIENT
. '/scratch/it'\''s a "home"; touch pwned $(touch pwned) `touch pwned` ü&|<x>/env.sh'
export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
IFS= read -r -d '' command <<'CROSSFED' || true
trap : USR1 TERM
cd '/tmp/a b' && export X='it'\''s' && python3 -m facility.round --model "$(pwd)/m o" --out update 2>&1
CROSSFED
srun --kill-on-bad-exit=0 bash -c "$command"