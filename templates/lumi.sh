{# https://docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/lumig-job/ -#}
{% extends "slurm.sh" %}
{% block about %}
# LUMI-G (AMD, ROCm): 4 MI250X are 8 GPUs of 64 GB a node; 56 cores are for users.
{% endblock %}
{% block partition %}
#SBATCH --partition=standard-g
{% endblock %}
{% block resources %}
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=56
#SBATCH --mem=480G
#SBATCH --exclusive
{% endblock %}
{% block environment %}
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3 GLOO_SOCKET_IFNAME=hsn0 NCCL_NET_GDR_LEVEL=3 FI_CXI_DEFAULT_CQ_SIZE=131072
# A name that nobody guesses: kernels are loaded from there, and whoever makes the directory first fills it.
export MIOPEN_USER_DB_PATH="$(mktemp -u "/tmp/$USER-miopen-XXXXXXXXXXXX")"
export MIOPEN_CUSTOM_CACHE_DIR="$MIOPEN_USER_DB_PATH"
{% endblock %}
