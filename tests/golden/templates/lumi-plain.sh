#!/bin/bash
# LUMI-G (AMD, ROCm): 4 MI250X are 8 GPUs of 64 GB a node; 56 cores are for users.
#SBATCH --account=my-account
#SBATCH --partition=standard-g
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=56
#SBATCH --mem=480G
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --signal=USR1@300
unset SSH_CLIENT SSH2_CLIENT
. ''"$HOME"'/crossfed/env.sh'
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3 GLOO_SOCKET_IFNAME=hsn0 NCCL_NET_GDR_LEVEL=3 FI_CXI_DEFAULT_CQ_SIZE=131072
# A name that nobody guesses: kernels are loaded from there, and whoever makes the directory first fills it.
export MIOPEN_USER_DB_PATH="$(mktemp -u "/tmp/$USER-miopen-XXXXXXXXXXXX")"
export MIOPEN_CUSTOM_CACHE_DIR="$MIOPEN_USER_DB_PATH"
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
IFS= read -r -d '' command <<'CROSSFED' || true
trap : USR1 TERM
cd '/tmp/a b' && export X='it'\''s' && python3 -m facility.round --model "$(pwd)/m o" --out update 2>&1
CROSSFED
srun --kill-on-bad-exit=0 bash -c "$command"