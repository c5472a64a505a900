{# https://docs.macc.fccn.pt/deucalion/ -#}
{% extends "slurm.sh" %}
{% block about %}
# Deucalion GPU: 4 A100 (40 GB; partition normal-a100-80: 80 GB) and 128 cores a node.
{% endblock %}
{% block partition %}
#SBATCH --partition=normal-a100-40
{% endblock %}
{% block resources %}
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=128
#SBATCH --mem=0
{% endblock %}
{% block environment %}
export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
{% endblock %}
