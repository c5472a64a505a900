"""Text of one facility's configuration files.

Sources: slurm.conf(5), gres.conf(5), cgroup.conf(5), sshd_config(5), munged(8).
"""

from __future__ import annotations

import shlex
from pathlib import Path

from coordinator.testbed.layout import Site

GPUS = 4
CORES = 4
"""Cores that each node claims, whatever the machine has (`config_overrides`)."""


def slurm_conf(site: Site) -> str:
    """A controller and two nodes; no cgroups, no accounting; jobs are remembered for an hour after their end."""
    first, second = site.nodes
    node = f"NodeAddr={site.address} CPUs={CORES} RealMemory=8000 Gres=gpu:{GPUS} State=UNKNOWN"
    return f"""\
ClusterName={site.name}
SlurmctldHost={site.name}({site.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={site.run}/munge.sock
CredType=cred/munge
StateSaveLocation={site.spool}/slurmctld
SlurmctldPidFile={site.run}/slurmctld.pid
SlurmctldLogFile={site.log}/slurmctld.log
SlurmctldPort=6817
SlurmdSpoolDir={site.spool}/%n
SlurmdPidFile={site.run}/slurmd.%n.pid
SlurmdLogFile={site.log}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={site.log}/jobs.log
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=5,sched_min_interval=0,sched_interval=5
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=300
MinJobAge=3600
KillWait=5
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
GresTypes=gpu
NodeName={first} NodeHostname={first} Port=6818 {node}
NodeName={second} NodeHostname={second} Port=6819 {node}
PartitionName=main Nodes={first},{second} Default=YES MaxTime=INFINITE State=UP
"""


def cgroup_conf(version: tuple[int, int]) -> str:
    """Slurm 23.11 and later can do without cgroups altogether; before, the default is harmless."""
    return "CgroupPlugin=disabled\n" if version >= (23, 11) else "CgroupPlugin=autodetect\n"


def gres_conf(site: Site) -> str:
    """Stand-in GPUs: character devices that do nothing, so that --gpus-per-node can be asked for."""
    return f"Name=gpu File={site.etc}/gpu[0-{GPUS - 1}]\n"


def sshd_config(site: Site, *, penalises: bool) -> str:
    """Key authentication only, one user, no forwarding into the site beyond what a login node gives.

    `penalises`: this sshd turns away an address whose logins fail one after the other, unless it is told not to. All
    logins of a rehearsal come from one address, and some are meant to fail.
    """
    patience = "PerSourcePenalties no\n" if penalises else ""
    return f"""\
Port 22
ListenAddress {site.address}
HostKey {site.etc}/ssh_host_ed25519_key
PidFile {site.run}/sshd.pid
AuthorizedKeysFile {site.etc}/authorized_keys
AllowUsers {site.user}
PermitRootLogin no
PasswordAuthentication no
KbdInteractiveAuthentication no
PubkeyAuthentication yes
UsePAM no
StrictModes no
UseDNS no
PrintMotd no
PrintLastLog no
X11Forwarding no
MaxSessions 50
MaxStartups 50:30:100
SetEnv SLURM_CONF={site.slurm_conf}
Subsystem sftp internal-sftp
LogLevel VERBOSE
{patience}"""


def hosts(site: Site) -> str:
    names = f"{site.name} {' '.join(site.nodes)}"
    return f"127.0.0.1 localhost\n{site.address} {names}\n{site.coordinator_address} coordinator\n"


def ssh_config_entry(site: Site, key: str, known_hosts: str) -> str:
    return (
        f"Host {site.name}\n  HostName {site.address}\n  User {site.user}\n  IdentityFile {key}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {known_hosts}\n  StrictHostKeyChecking yes\n  BatchMode yes\n\n"
    )


def bashrc(python: Path) -> str:
    """What a login gives the user: this machine's Python, as a module would at a real site."""
    return f"export PATH={shlex.quote(str(python.parent))}:$PATH\n"


def site_template() -> str:
    """The testbed as a site of its own, for `--template testbed`: what differs from any Slurm site."""
    return f"""\
{{# https://slurm.schedmd.com/sbatch.html -#}}
{{% extends "slurm.sh" %}}
{{% block about %}}
# The testbed: {GPUS} stand-in GPUs and {CORES} cores a node; training runs on the processor.
{{% endblock %}}
{{% block account %}}
{{% endblock %}}
{{% block partition %}}
#SBATCH --partition=main
{{% endblock %}}
{{% block resources %}}
#SBATCH --cpus-per-task=1
{{% endblock %}}
"""


def env_sh(site: Site, python: Path) -> str:
    """What the job template sources: this machine's Python environment with the facility's own copy of the package."""
    return f"""\
export CROSSFED_HOME={shlex.quote(str(site.code))}
export PATH={shlex.quote(str(python.parent))}:$PATH
export PYTHONPATH={shlex.quote(str(site.code))} PYTHONNOUSERSITE=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
"""
