"""What each scheduler and launcher calls the same things: one table each, under the manual's address.

A *task* is a process that the scheduler starts: one a node, or one a rank. An *allocation* is the set of hosts that a
job holds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TaskTable:
    """Environment variables by which a task learns its number. The first name that is set counts."""

    name: str
    marks: tuple[str, ...]
    """This table applies when all of these are set."""
    task: tuple[str, ...]
    """Number of this task among all, from 0."""
    tasks: tuple[str, ...]
    """Number of tasks."""
    local_task: tuple[str, ...]
    """Number of this task on its node, from 0."""
    local_tasks: tuple[str, ...] = ()
    """Tasks on this node."""
    node: tuple[str, ...] = ()
    """Number of this node, from 0."""
    nodes: tuple[str, ...] = ()
    """Number of nodes."""
    counts: tuple[str, ...] = ()
    """Tasks on each node, as `4(x2),2`."""
    start: tuple[str, ...] = ()
    """Name of this start among those of one job, the same at all of its tasks."""
    daemons_in_step: bool = False
    """Slurm starts its daemons, on all nodes but the first, as a step, whose variables name these nodes alone."""


@dataclass(frozen=True, kw_only=True)
class AllocationTable:
    """Environment variables by which a job learns its hosts and its own name."""

    name: str
    job: tuple[str, ...]
    """Identifier of the job: unique in its cluster."""
    hosts: tuple[str, ...] = ()
    """Host list."""
    step_hosts: tuple[str, ...] = ()
    """Host list of the step of the job that this process is in."""
    step: tuple[str, ...] = ()
    """Number of that step."""
    host_file: tuple[str, ...] = ()
    """Path of a file whose lines begin with a host, repeated once per slot or not."""
    advice: str = "start it on each (srun, flux run, mpiexec, pbsdsh), as the files in templates/ do"
    """What to do where a job of several nodes was started on one of them only."""
    devices: tuple[str, ...] = ()
    """GPUs that the job has on this node, as a number."""
    devices_per_node: tuple[str, ...] = ()
    """GPUs that the job has on every node; `4`, `a100:4` or `gpu:a100:4`."""
    end: tuple[str, ...] = ()
    """When the job will be ended, in seconds since 1970."""
    start: tuple[str, ...] = ()
    """When the job was begun, in seconds since 1970."""


# https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
TORCHRUN = TaskTable(
    name="torchrun",
    marks=("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    task=("RANK",),
    tasks=("WORLD_SIZE",),
    local_task=("LOCAL_RANK",),
    local_tasks=("LOCAL_WORLD_SIZE",),
    node=("GROUP_RANK",),
)
# https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
OPEN_MPI = TaskTable(
    name="Open MPI",
    marks=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    task=("OMPI_COMM_WORLD_RANK",),
    tasks=("OMPI_COMM_WORLD_SIZE",),
    local_task=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_tasks=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    start=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    daemons_in_step=True,
)
# https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html
FLUX = TaskTable(
    name="Flux",
    marks=("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    task=("FLUX_TASK_RANK",),
    tasks=("FLUX_JOB_SIZE",),
    local_task=("FLUX_TASK_LOCAL_ID",),
    nodes=("FLUX_JOB_NNODES",),
)
# https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES; sbatch sets SLURM_PROCID too, but no
# SLURM_STEP_ID
SRUN = TaskTable(
    name="Slurm",
    marks=("SLURM_STEP_ID", "SLURM_PROCID"),
    task=("SLURM_PROCID",),
    tasks=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    local_task=("SLURM_LOCALID",),
    node=("SLURM_NODEID",),
    nodes=("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    counts=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
)
# https://cpe.ext.hpe.com/docs/latest/getting_started/HPE-Cray-Programming-Environment-User-Guide-HPCM.html (PALS:
# mpiexec under PBS)
PALS = TaskTable(
    name="PALS",
    marks=("PALS_RANKID", "PMI_SIZE"),
    task=("PALS_RANKID",),
    tasks=("PMI_SIZE",),
    local_task=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
    local_tasks=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    node=("PALS_NODEID",),
    start=("PALS_APID",),
)
# https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md (MPICH, Intel MPI,
# MVAPICH)
PMI = TaskTable(
    name="PMI",
    marks=("PMI_RANK", "PMI_SIZE"),
    task=("PMI_RANK",),
    tasks=("PMI_SIZE",),
    local_task=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    local_tasks=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
)
# https://2022.help.altair.com/2022.1.0/PBS%20Professional/PBSUserGuide2022.1.pdf, "pbsdsh": one task for each line of
# the node file, which lies on the first node only (templates/pbs.sh hands it on); PBS_NODENUM counts nodes, so one
# task a node
PBSDSH = TaskTable(
    name="pbsdsh",
    marks=("PBS_JOBID", "PBS_NODENUM", "CROSSFED_HOSTS"),
    task=("PBS_NODENUM",),
    tasks=(),
    local_task=(),
)
TASKS = (TORCHRUN, OPEN_MPI, FLUX, SRUN, PALS, PMI, PBSDSH)
"""The innermost launcher wins: mpirun and flux start their daemons by srun, whose variables their tasks inherit."""

# https://slurm.schedmd.com/sbatch.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
SLURM_JOB = AllocationTable(
    name="Slurm",
    job=("SLURM_JOB_ID", "SLURM_JOBID"),
    hosts=("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    step_hosts=("SLURM_STEP_NODELIST",),
    step=("SLURM_STEP_ID",),
    devices=("SLURM_GPUS_ON_NODE",),
    devices_per_node=("SLURM_GPUS_PER_NODE",),
    end=("SLURM_JOB_END_TIME",),
    start=("SLURM_JOB_START_TIME",),
)
# https://2022.help.altair.com/2022.1.0/PBS%20Professional/PBSUserGuide2022.1.pdf, "Environment Variables Provided by
# PBS"
PBS_JOB = AllocationTable(name="PBS", job=("PBS_JOBID",), host_file=("PBS_NODEFILE",))
# https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html; no host list there:
# the template asks `flux hostlist`
FLUX_JOB = AllocationTable(name="Flux", job=("FLUX_JOB_ID", "FLUX_ENCLOSING_ID"))
# https://gridscheduler.sourceforge.net/htmlman/htmlman1/qsub.html, "ENVIRONMENTAL VARIABLES"; jobs of one node only
GRID_ENGINE_JOB = AllocationTable(
    name="grid engine",
    job=("JOB_ID",),
    host_file=("PE_HOSTFILE",),
    advice="jobs of several hosts are not supported under grid engine: ask for a parallel environment that keeps a "
    "job on one host (`qconf -sp NAME` says allocation_rule $pe_slots), as templates/gridengine.sh does",
)
ALLOCATIONS = (FLUX_JOB, SLURM_JOB, PBS_JOB, GRID_ENGINE_JOB)

HOSTS = "CROSSFED_HOSTS"
"""Host list of the job, set by a template where the scheduler's environment has none; wins over the tables."""
RANKS_PER_NODE = "CROSSFED_RANKS_PER_NODE"
"""Ranks on each node, as `4(x2),2`, with one task a node; wins over what is found on the nodes."""
START = "CROSSFED_START"
"""Name of this start of the job, set by a template where the launcher gives none; wins over the tables."""
