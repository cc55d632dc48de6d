"""What a real Slurm answers about jobs that users describe in unusual ways."""

import time

import pytest

from parsl_freetrain.sites.batch.demand import needs
from parsl_freetrain.sites.batch.records import BatchJob, JobState
from parsl_freetrain.sites.slurm import answers_text
from parsl_freetrain.sites.slurm.options import SlurmOptions
from parsl_freetrain.sites.slurm.scheduler import Slurm
from tests.support.slurm import Cluster

pytestmark = pytest.mark.slurm


def jobs() -> dict[str, BatchJob]:
    slurm = Slurm(SlurmOptions(partition='batch', form='text'))
    return {job.job_id: job for job in slurm.jobs()}


def test_names_with_line_ends_and_forged_records_are_names(slurm: Cluster) -> None:
    running = slurm.submit('--nodes=1')
    slurm.wait(lambda: slurm.state(running) == 'RUNNING')
    forged = answers_text.job_format('f' * 16).replace('%i', running).replace('%T', 'COMPLETED')
    names = ['a\nb|c', 'x\x0cy\x1cz\u2028', f'x\n{forged}', f'{running}|COMPLETED|\n{running}|']
    ids = [slurm.submit('--hold', f'--job-name={name}') for name in names]
    found = jobs()
    for job_id in ids:  # other tests on this cluster read names line by line
        slurm.run('scontrol', 'update', f'JobId={job_id}', 'JobName=plain')
    assert [found[job_id].name for job_id in ids] == names
    assert {found[job_id].state for job_id in ids} == {JobState.PENDING}
    assert found[running].state is JobState.RUNNING and len(found[running].names) == 1


def test_jobs_that_ask_for_tasks_or_cpus_need_as_many_nodes_as_slurm_says(slurm: Cluster) -> None:
    """Not only the minimum that the job asks for: three tasks, one CPU on each node."""

    def nodes(*options: str) -> int:
        job = slurm.run('sbatch', '--parsable', '--hold', *options, '--wrap=true').strip()
        return jobs()[job].nodes

    assert nodes('--ntasks=3') == nodes('--ntasks=3', '--exclusive') == 3
    assert nodes('--ntasks=2', '--nodes=2', '--exclusive') == nodes('--nodes=2') == 2
    assert nodes('--ntasks=1', '--exclusive') == 1


def test_gpus_of_a_whole_job_are_asked_for_once_where_they_decide_who_serves_it(
    has_slurm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node has a CPU for it and no GPU, the other is a block's."""
    sizes = {'SLURM_CLUSTER_CPUS': '4', 'SLURM_CLUSTER_GPUS': '2'}
    with Cluster.running(2, within='/tmp', **sizes) as cluster:
        monkeypatch.setenv('SLURM_CONF', str(cluster.conf))

        def submit(*options: str) -> str:
            words = 'sbatch', '--parsable', '--output=/dev/null', *options, '--wrap=sleep 900'
            return cluster.run(*words).strip()

        submit('--nodelist=node01', '--gres=gpu:2', '--time=60')
        block = submit('--nodelist=node02', '--exclusive', '--time=60')
        cluster.wait(lambda: cluster.state(block) == 'RUNNING')
        asked = '--gpus=1', '--gpus-per-task=1'
        waiting = [submit(option, '--ntasks=1', '--time=10') for option in asked]
        slurm = Slurm(SlurmOptions(partition='batch'))
        slurm.queue()
        nodes, ours = slurm.nodes(), frozenset({block})
        for questions in (2, 3):
            found = slurm.jobs()
            assert [job.gpus for job in found if job.job_id in waiting] == [1, 1]
            (demand,) = needs(nodes, found, (), ours, time.time()).demands
            assert demand.job == waiting[0] and demand.among == {'node02'}, 'it has two GPUs'
            assert slurm.client.commands['squeue'] == questions
        # It gets all memory of a node; on one a job has some.
        whole = submit('--ntasks=1', '--mem=0', '--time=10')
        found = tuple(job for job in slurm.jobs() if job.job_id not in waiting)
        assert [d.job for d in needs(nodes, found, (), ours, time.time()).demands] == [whole]
