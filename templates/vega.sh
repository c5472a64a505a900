{# https://doc.vega.izum.si/slurm/ -#}
{% extends "slurm.sh" %}
{% block about %}
# Vega GPU: 4 A100 (40 GB) and 128 cores a node.
{% endblock %}
{% block partition %}
#SBATCH --partition=gpu
{% endblock %}
{% block resources %}
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=128
#SBATCH --mem=0
#SBATCH --exclusive
{% endblock %}
{% block environment %}
export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
{% endblock %}
