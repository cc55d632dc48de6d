"""What schedulers of several releases said of one scene, and answers that are damaged."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import strategies as st

from parsl_freetrain.sites import cobalt
from parsl_freetrain.sites.batch.demand import Needs, needs
from parsl_freetrain.sites.batch.node_windows import Wanted, windows
from parsl_freetrain.sites.batch.records import (
    BatchJob,
    JobState,
    NodeReservation,
    Nodes,
    NotUnderstood,
)
from parsl_freetrain.sites.pbspro import answers as pbs
from parsl_freetrain.sites.slurm import answers_json, answers_text
from tests.support import slurm_scene
from tests.support.properties import holds_for
from tests.support.slurm import slurm_24_11

ZOO = Path(__file__).with_name('zoo')
NOW = 1_800_000_000.0


def told(job: BatchJob) -> BatchJob:
    """What text and document both tell: an array's first number, one reason, no restarts."""
    job_id, reason = job.job_id.partition('_')[0], job.reason.partition(',')[0]
    return replace(job, job_id=job_id, reason=reason, restarts=0, memory_per_cpu=0.0)


def check_scene(folder: Path) -> None:
    """Text and document of the same cluster tell the same jobs, and what is known of the scene."""

    def said(name: str) -> str:
        return (folder / name).read_text()

    jobs = answers_text.parse_jobs(said('squeue.txt'))
    gpus: dict[str, list[str]] = {}
    if (folder / 'gpus.txt').exists():  # only 22.05 and 24.11 were asked
        gpus = answers_text.parse_gpus(said('gpus.txt'))
    text = {job.name: told(job) for job in answers_text.with_gpus(jobs, gpus)}
    for name, count in {'gpus-in-all': 2, 'gpus-of-tasks': 1, 'gpus-of-sockets': 1}.items():
        assert not gpus or text[name].gpus == count
    if folder.name[6:] not in ('20.11', '21.08', '22.05'):  # no document with planned nodes
        found = [told(job) for job in answers_json.parse_jobs(said('squeue.json'))]
        assert {job.name: job for job in found} == text
    assert {name for name, job in text.items() if job.state is JobState.RUNNING} == {
        'running', 'running-gpu', 'icelake',
    }  # fmt: skip
    assert {name for name, job in text.items() if job.blocked or job.state is JobState.HELD} >= {
        'held', 'tomorrow', 'behind', 'reserved',
    }  # fmt: skip
    assert text['either'].features == (frozenset({'skylake'}), frozenset({'icelake'}))
    assert text['both'].features == (frozenset({'icelake', 'big'}),)
    assert (text['gpus'].gpus, text['gpus'].nodes, text['array'].tasks) == (2, 2, 3)
    assert (text['named'].only, text['either'].excluded) == (('node01',), ('node04',))
    assert text['running-gpu'].gpus == 1 and text['large'].limit_s == 3600.0
    nodes = [n for n in answers_text.parse_nodes(said('sinfo.txt')) if n.partition == 'batch']
    assert {n: group.features for group in nodes for n in group.names} == {
        'node01': ('skylake',), 'node02': ('icelake', 'big'), 'node03': ('icelake',), 'node04': (),
    }  # fmt: skip
    assert all(group.gpus == 2 and not group.usable for group in nodes)
    reservations = answers_text.parse_reservations(said('reservation.txt'))
    assert {r.name: r.nodes for r in reservations} == {
        'ours': ('node03',), 'maint': ('node01', 'node02'),
    }  # fmt: skip
    assert all(r.end_s == r.start_s + 3600 and r.start_s > NOW - 1e8 for r in reservations)
    batch = answers_text.parse_partitions(said('partition.txt'))['batch']
    assert (batch.longest_s, batch.most_nodes, batch.tier) == (172800.0, None, 10)


@pytest.mark.parametrize('release', sorted(path.name for path in ZOO.glob('slurm-*')))
def test_text_and_document_of_one_cluster_tell_the_same(release: str) -> None:
    check_scene(ZOO / release)


def test_polaris_as_its_guide_shows_it() -> None:
    nodes, queue = (path.read_text() for path in sorted((ZOO / 'pbspro-2022.1').iterdir()))
    (ours,) = pbs.parse_nodes(nodes, 'prod', {'system': 'polaris'})
    assert (ours.state, ours.gpus, ours.cpus, ours.memory) == ('idle', 4, 64, 515072.0)
    assert [n.names for n in pbs.parse_nodes(nodes, 'prod', {}) if n.usable] == [ours.names]
    found = [(job.state.name, job.nodes, job.blocked) for job in pbs.parse_jobs(queue, 'prod')]
    states = zip(('RUNNING', 'PENDING', 'PENDING', 'HELD'), (60, 32, 64, 464), strict=True)
    assert found == [(*state, False) for state in states]


@pytest.fixture
def slurm24(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with slurm_24_11(tmp_path, monkeypatch, SLURM_CLUSTER_GPUS='2'):
        yield


@pytest.mark.long
@pytest.mark.slurm24
def test_slurm_24_11_tells_it_so(slurm24: None, tmp_path: Path) -> None:
    slurm_scene.begin()
    slurm_scene.record(tmp_path / 'said')
    check_scene(tmp_path / 'said')


# --- one cluster, in every form

GPU_KIND = ('icelake', 'gpu:a100'), 4
KINDS = {'skylake': ((), 0), 'icelake': (('icelake', 'big'), 0), 'gpu': GPU_KIND}
ODD = ('', 'Nodes=n0', 'EndTime=5 StartTime=1', 'ReservationName=x Nodes=n1', '"|\\', 'é%N')

Said = tuple[tuple[Nodes, ...], tuple[BatchJob, ...], tuple[NodeReservation, ...]]


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Said, str]:
    """A cluster, and odd text that users wrote."""
    names = [f'n{i}' for i in range(draw(st.integers(1, 6)))]
    kinds = {name: draw(st.sampled_from(sorted(KINDS))) for name in names}
    states = {name: draw(st.sampled_from(['idle', 'idle', 'drained'])) for name in names}
    jobs: list[BatchJob] = []
    free = [name for name in names if states[name] == 'idle']
    for number in range(draw(st.integers(0, 5))):
        count, name = draw(st.integers(1, 3)), draw(st.sampled_from(ODD))
        limit_s, priority = 60.0 * draw(st.integers(1, 600)), float(draw(st.integers(1, 9)))
        job = BatchJob(str(number), JobState.PENDING, 'batch', count, user='eve', name=name)
        job = replace(job, limit_s=limit_s, priority=priority)
        if bool(free) and draw(st.booleans()):
            held = tuple(free[: job.nodes])
            free = free[job.nodes :]
            states |= dict.fromkeys(held, 'allocated')
            end = NOW + draw(st.integers(60, 9000))
            job = replace(
                job, state=JobState.RUNNING, nodes=len(held), names=held, start_s=NOW - 9, end_s=end
            )
        elif draw(st.integers(0, 1)):
            some = tuple(sorted(draw(st.sets(st.sampled_from(names), min_size=1, max_size=3))))
            job = replace(job, start_s=NOW + draw(st.integers(1, 9000)), planned=some)
        if draw(st.booleans()):
            features, gpus = KINDS[draw(st.sampled_from(sorted(KINDS)))]
            types = [f for f in features if f.startswith('gpu:')]
            plain = [f for f in features if f not in types]
            job = replace(job, features=(frozenset([*plain, *types]),) if plain else (), gpus=gpus)
        jobs.append(job)
    nodes = tuple(
        Nodes('batch', (n,), states[n], '', *KINDS[kinds[n]], cpus=64, memory=1000.0) for n in names
    )
    reservations = tuple(
        NodeReservation(f'r{i}', NOW + begin, NOW + begin + 600, (draw(st.sampled_from(names)),))
        for i, begin in enumerate(draw(st.lists(st.integers(-300, 9000), max_size=2)))
    )
    return (nodes, tuple(jobs), reservations), draw(st.sampled_from(ODD))


def gres(features: tuple[str, ...] | frozenset[str], gpus: int) -> str:
    return f'gpu:a100:{gpus}' if 'gpu:a100' in features else f'gpu:{gpus}' if gpus else '(null)'


def plain(features: tuple[str, ...] | frozenset[str], mark: str) -> str:
    return mark.join(sorted(f for f in features if not f.startswith('gpu:'))) or '(null)'


def nodes_text(nodes: tuple[Nodes, ...]) -> str:
    return ''.join(
        f'batch|{n.state}|{gres(n.features, n.gpus)}|{plain(n.features, ",")}|64|1000|'
        f'{n.names[0]}\n'
        for n in nodes
    )


def in_all(job: BatchJob) -> str:
    """What a job says that has asked for all of its GPUs together."""
    wanted = job.features[0] if job.features else frozenset[str]()
    apart = job.gpus > 0 and int(job.job_id) % 2 == 0
    return f'gres:{gres(wanted, job.gpus * job.nodes)}' if apart else 'N/A'


def gpus_text(jobs: tuple[BatchJob, ...]) -> str:
    rows = ((job.job_id, 'N/A', in_all(job), 'N/A', '1') for job in jobs)
    return ''.join(''.join(f'{column:64}' for column in row) + '\n' for row in rows)


def jobs_text(jobs: tuple[BatchJob, ...]) -> str:
    bar = f'|{slurm_scene.MARK}'
    lines = []
    for job in jobs:
        wanted = job.features[0] if job.features else frozenset[str]()
        start, end = ('N/A' if t is None else str(int(t)) for t in (job.start_s, job.end_s))
        limit = f'{int(job.limit_s or 0) // 60}:00'
        lines.append(
            bar.join(
                (
                    *(f'{bar}<{job.job_id}', job.state.name, job.partition, str(job.nodes), start),
                    *(end, ','.join(job.planned), ','.join(job.names), job.user, 'Resources'),
                    *(limit, str(int(job.priority)), '', ''),
                    *(gres(wanted, job.gpus) if in_all(job) == 'N/A' else 'N/A', '(null)'),
                    *(plain(wanted, '&'), '64', '1', '0', 'NO', job.name),
                )
            )
            + f'{bar}>\n'
        )
    return ''.join(lines)


def jobs_document(jobs: tuple[BatchJob, ...], release: tuple[int, int]) -> str:
    def number(value: float | None) -> dict[str, object]:
        return {'set': value is not None, 'infinite': False, 'number': value or 0}

    found = []
    for job in jobs:
        wanted = job.features[0] if job.features else frozenset[str]()
        asked = gres(wanted, job.gpus)
        found.append(
            {
                'job_id': int(job.job_id),
                'job_state': [job.state.name] if release >= (23, 11) else job.state.name,
                'partition': job.partition,
                'node_count': number(job.nodes),
                'start_time': number(job.start_s),
                'end_time': number(job.end_s),
                'scheduled_nodes': ','.join(job.planned),
                'nodes': ','.join(job.names),
                'user_name': job.user,
                'state_reason': 'Resources',
                'name': job.name,
                'time_limit': number((job.limit_s or 0) / 60),
                'priority': number(job.priority),
                'features': plain(wanted, '&').replace('(null)', ''),
                'tres_per_node': f'gres/{asked}' if job.gpus and in_all(job) == 'N/A' else '',
                'tres_per_job': in_all(job).replace('N/A', ''),
                'shared': ['none'] if release >= (23, 11) else 'none',
            }
        )
    return json.dumps({'jobs': found})


def reservations_text(reservations: tuple[NodeReservation, ...], odd: str) -> str:
    return (
        ''.join(
            f'ReservationName={r.name} StartTime={int(r.start_s)} EndTime={int(r.end_s)} '
            f'Duration=00:10:00 Nodes={r.nodes[0]} NodeCnt=1 Features=(null) Comment={odd}\n'
            for r in reservations
        )
        or 'No reservations in the system\n'
    )


def verdict(said: Said, wanted: Wanted) -> tuple[dict[str, float], Needs]:
    """Holes, and what waiting jobs need of the nodes of job 0."""
    nodes, jobs, reservations = said
    jobs = tuple(replace(job, blocked=False, reason='', user='eve') for job in jobs)
    return windows(nodes, jobs, reservations, wanted, frozenset('0'), NOW), needs(
        nodes, jobs, reservations, frozenset('0'), NOW
    )


WANTED = [Wanted('batch', (frozenset(f),) if f else (), g) for f, g in KINDS.values()]
FORMS: dict[str, Callable[[tuple[BatchJob, ...]], tuple[BatchJob, ...]]] = {
    'text': lambda jobs: tuple(
        answers_text.with_gpus(
            answers_text.parse_jobs(jobs_text(jobs)), answers_text.parse_gpus(gpus_text(jobs))
        )
    ),
    '23.02': lambda jobs: answers_json.parse_jobs(jobs_document(jobs, (23, 2))),
    '24.11': lambda jobs: answers_json.parse_jobs(jobs_document(jobs, (24, 11))),
}


@holds_for(clusters(), tries=400)
def test_every_form_of_slurms_gives_holes_and_demands_of_cluster(drawn: tuple[Said, str]) -> None:
    said, odd = drawn
    nodes = answers_text.parse_nodes(nodes_text(said[0]))
    reservations = answers_text.parse_reservations(reservations_text(said[2], odd))
    for form, parse in FORMS.items():
        for wanted in WANTED:
            assert verdict((nodes, parse(said[1]), reservations), wanted) == verdict(
                said, wanted
            ), form


@holds_for(clusters(), tries=400)
def test_pbs_gives_the_holes_and_demands_of_the_cluster(drawn: tuple[Said, str]) -> None:
    """Its jobs ask for no features here, and an estimate that has gone by says nothing."""
    (nodes, jobs, _), odd = drawn
    jobs = tuple(replace(job, features=(), gpus=0) for job in jobs)
    bare = tuple(replace(n, features=(), gpus=0) for n in nodes)
    states = {'idle': 'free', 'drained': 'offline', 'allocated': 'job-exclusive'}
    vnodes = {
        n.names[0]: {'state': states[n.state], 'comment': odd, 'resources_available': {'ncpus': 4}}
        for n in bare
    }
    queue = {}
    for job in jobs:
        asked = {'nodect': job.nodes, 'walltime': int(job.limit_s or 0), 'place': 'excl'}
        record: dict[str, object] = {'Job_Name': job.name, 'Job_Owner': 'eve@login'}
        record |= {'job_state': 'R' if job.names else 'Q', 'Priority': int(job.priority)}
        record['Resource_List'] = asked
        if job.names:
            record['exec_vnode'] = '+'.join(f'({name}:ncpus=4)' for name in job.names)
            record['stime'] = int((job.end_s or 0) - (job.limit_s or 0))
        elif job.start_s is not None:
            vnode = '+'.join(f'({name}:ncpus=4)' for name in job.planned)
            record['estimated'] = {'start_time': int(job.start_s), 'exec_vnode': vnode}
        queue[job.job_id] = record
    found = (
        pbs.parse_nodes(json.dumps({'nodes': vnodes}), 'batch', {}),
        pbs.parse_jobs(json.dumps({'timestamp': int(NOW), 'Jobs': queue}), 'batch'),
        (),
    )
    order = {n: i for i, n in enumerate(vnodes)}
    split = sorted(
        (replace(g, names=(n,)) for g in found[0] for n in g.names), key=lambda g: order[g.names[0]]
    )
    wanted = Wanted('batch')
    assert verdict((tuple(split), *found[1:]), wanted) == verdict((bare, jobs, ()), wanted)


# --- damaged answers

READERS: dict[str, Callable[[str], object]] = {
    'gpus.txt': answers_text.parse_gpus,
    'squeue.txt': answers_text.parse_jobs,
    'squeue.json': answers_json.parse_jobs,
    'sinfo.txt': answers_text.parse_nodes,
    'reservation.txt': answers_text.parse_reservations,
    'partition.txt': answers_text.parse_partitions,
    'pbsnodes': lambda said: pbs.parse_nodes(said, 'batch', {'system': 'polaris'}),
    'pbs_rstat': pbs.parse_reservations,
    'qstat-Q': lambda said: {
        name: (pbs.limits(name, queue), pbs.node_owners(name, queues), pbs.queue_ranks(queues))
        for queues in [pbs.parse_queues(said)]
        for name, queue in queues.items()
    },
    'qstat': lambda said: pbs.parse_jobs(said, 'batch'),
    'history': answers_text.parse_history,
    'exits': answers_text.parse_exits,
    'cobalt/qstat': lambda said: cobalt.parse_jobs(said, 'batch'),
    'cobalt/nodelist': lambda said: cobalt.parse_nodes(said, 'batch', NOW),
    'cobalt/showres': cobalt.parse_reservations,
}
COBALT = ZOO.with_name('cobalt') / 'recorded'
ANSWERS = [
    (reader, path.read_text(errors='replace'))
    for path in sorted(ZOO.glob('*/*'))
    if path.name != 'squeue.json'
    for reader in [max((r for r in READERS if path.name.startswith(r)), key=len)]
]
ANSWERS += [(f'cobalt/{path.stem}', path.read_text()) for path in sorted(COBALT.iterdir())]
ANSWERS += [('history', '7|CANCELLED by 0|0:15\n8|FAILED|143:0\n'), ('exits', '7 15\n8 256\n')]
JUNK = ['', '²', '-1', '9' * 400, 'n[1-', 'n[0-99999999]']
JUNK += ['{', 'null', '[]', '0', 'é\0', 'NaN', '\n']


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, str]:
    """An answer that was cut off, or has other words in places."""
    reader, said = draw(st.sampled_from(ANSWERS))
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(said)))
        end = draw(st.sampled_from([begin, begin + 1, begin + 9, begin + 200, len(said)]))
        said = said[:begin] + draw(st.sampled_from(JUNK) | st.text(max_size=5)) + said[end:]
    return reader, said


@holds_for(damaged(), tries=800)
def test_a_damaged_answer_is_read_or_not_understood(drawn: tuple[str, str]) -> None:
    reader, said = drawn
    with suppress(NotUnderstood):
        READERS[reader](said)


def test_a_banner_before_an_answer_is_skipped_and_alone_it_is_none() -> None:
    """A wrapper or a login shell may print one; it is no empty queue, and nothing is idle."""
    right = dict(reversed(ANSWERS))
    for reader in right.keys() - {'exits', 'gpus.txt', 'history'}:
        said = right[reader]
        for banner in ('', 'Welcome, 3|4\n', '\n** Welcome: it is 8:00\n\nJobs may be slow.\n'):
            assert READERS[reader](banner + said) == READERS[reader](said)
            if banner:
                with pytest.raises(NotUnderstood, match='answered .*Welcome'):
                    READERS[reader](banner)
    for reader in ('sinfo.txt', 'qstat', 'pbsnodes'):
        with pytest.raises(NotUnderstood, match="'nothing'"):
            READERS[reader]('')
    with pytest.raises(NotUnderstood, match='has no Jobs'):
        READERS['qstat']('{"error": "cannot connect"}')


@holds_for(clusters(), st.data(), tries=800)
def test_a_damaged_answer_makes_no_holes(drawn: tuple[Said, str], data: st.DataObject) -> None:
    """Cut off within a line, or with a state, a time or a list of nodes that nobody can read."""
    (nodes, jobs, reservations), _ = drawn
    said = {'nodes': nodes_text(nodes), 'jobs': jobs_text(jobs)}
    said['reservations'] = reservations_text(reservations, '')
    where = data.draw(st.sampled_from(sorted(said)))
    text = said[where]
    if data.draw(st.booleans()) and text:
        cut = data.draw(st.integers(1, len(text) - 1))
        said[where] = text[: cut - (text[cut - 1] == '\n')]
    elif where == 'nodes':
        said[where] = text.replace('|idle|', '|' + data.draw(st.sampled_from(JUNK[2:])) + '|', 1)
    elif where == 'reservations':
        field = data.draw(st.sampled_from(['StartTime=', ' EndTime=', ' Nodes=']))
        said[where] = text.replace(
            field, field + data.draw(st.sampled_from(('n[1-', '²[x', 'n[é]'))), 1
        )
    right = verdict((nodes, jobs, reservations), WANTED[0])[0]
    try:
        found = (
            answers_text.parse_nodes(said['nodes']),
            answers_text.parse_jobs(said['jobs']),
            answers_text.parse_reservations(said['reservations']),
        )
    except NotUnderstood:
        return
    holes = verdict(found, WANTED[0])[0]
    assert all(end <= right.get(name, -math.inf) for name, end in holes.items()), (holes, right)
