{# https://www.bsc.es/supportkc/docs/MareNostrum5/slurm/ -#}
{% extends "slurm.sh" %}
{% block about %}
# MareNostrum 5 ACC: 4 H100 (64 GB) and 80 cores a node; 20 cores are asked for with each GPU.
{% endblock %}
{% block partition %}
#SBATCH --qos=<qos>
#SBATCH --partition=acc
{% endblock %}
{% block resources %}
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=80
#SBATCH --exclusive
{% endblock %}
{% block environment %}
export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
{% endblock %}
