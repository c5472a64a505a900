{# https://docs.lxp.lu/first-steps/handling_jobs/ -#}
{% extends "slurm.sh" %}
{% block about %}
# MeluXina GPU: 4 A100 (40 GB) and 64 cores a node; whole nodes only.
{% endblock %}
{% block partition %}
#SBATCH --partition=gpu
#SBATCH --qos=default
{% endblock %}
{% block resources %}
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=64
{% endblock %}
{% block environment %}
export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
{% endblock %}
