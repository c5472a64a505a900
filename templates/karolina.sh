{# https://docs.it4i.cz/karolina/compute-nodes/ -#}
{% extends "slurm.sh" %}
{% block about %}
# Karolina: 8 A100 (40 GB) and 128 cores a node; partition qgpu counts single GPUs.
{% endblock %}
{% block partition %}
#SBATCH --partition=qgpu
{% endblock %}
{% block resources %}
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=128
#SBATCH --exclusive
{% endblock %}
{% block environment %}
export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
{% endblock %}
