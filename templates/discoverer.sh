{# https://docs.discoverer.bg/resource_overview.html -#}
{% extends "slurm.sh" %}
{% block about %}
# Discoverer+: 8 H200 (141 GB) a DGX node; account and QoS are both the project's name.
{% endblock %}
{% block partition %}
#SBATCH --qos=<qos>
#SBATCH --partition=common
{% endblock %}
{% block resources %}
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --exclusive
{% endblock %}
