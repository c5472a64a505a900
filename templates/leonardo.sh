{# https://docs.hpc.cineca.it/hpc/leonardo.html -#}
{% extends "slurm.sh" %}
{% block about %}
# Leonardo Booster: 4 A100 (64 GB) and 32 cores a node, two InfiniBand HDR cards.
{% endblock %}
{% block partition %}
#SBATCH --partition=boost_usr_prod
{% endblock %}
{% block resources %}
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --mem=494000
#SBATCH --exclusive
{% endblock %}
{% block environment %}
ulimit -n "$(ulimit -Hn)"
export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0 NCCL_IB_TIMEOUT=22
{% endblock %}
