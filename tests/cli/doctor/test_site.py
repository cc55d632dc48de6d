"""``freetrain doctor --site``: right and outdated files of sites, on a real Slurm and PBS."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain.cli.doctor.site import SiteFile, examine, of_nodes, of_queue
from parsl_freetrain.cli.main import main
from parsl_freetrain.sites.batch.limits import QueueLimits
from parsl_freetrain.sites.batch.records import Partition
from parsl_freetrain.sites.slurm import SlurmOptions
from tests.support.openpbs import PbsCluster
from tests.support.programs import programs
from tests.support.slurm import Cluster

FILE = """\
from parsl.config import Config

from parsl_freetrain import BackfillProvider, FreeTrainExecutor, {kind}
from parsl_freetrain.sites.batch.limits import QueueLimits, limits_of

QUEUES = {{
    'debug': QueueLimits(nodes=(1, {nodes}), walltime_s=(60, 600), jobs=4),
    {more}
}}
INIT = 'export PATH={bin}:$PATH'
TMP = 'export TMPDIR={tmp}'


def site(account=None, queue='debug'):
    limits = limits_of('Here', QUEUES, queue).settings(300)
    init = f'{{INIT}}\\n{{TMP}}'
    return {kind}({queue}=queue, worker_init=init, poll_s=0.5, start_s=3.0, **limits)


def config():
    provider = BackfillProvider(site=site())
    return Config(executors=[FreeTrainExecutor(provider=provider)], strategy='none')
"""


def written(folder: Path, kind: str, nodes: int = 2, more: str = '', tmp: str = '/tmp') -> Path:
    path = folder / 'here.py'
    path.write_text(
        FILE.format(
            kind=kind,
            nodes=nodes,
            more=more,
            tmp=tmp,
            bin=Path(sys.executable).parent,
            queue='queue' if kind == 'PbsSite' else 'partition',
        )
    )
    return path


def doctor(path: Path, nodes: int) -> tuple[int, list[dict[str, str]]]:
    """The exit status, and what is said of the site."""
    out = path.with_suffix('.json')
    where = '--checkpoints', str(path.parent), '--out', str(out), '--site', str(path)
    status = main(['doctor', *where, '--nodes', str(nodes)])
    found = json.loads(out.read_text())['findings']
    return status, found[[f['what'] for f in found].index('ports') + 1 :]


def wrong_file_is_told(folder: Path, kind: str) -> None:
    path = written(folder, kind, 8, "'gone': QueueLimits((1, 4), (60, 600), jobs=4),")
    found = examine(str(path), folder, 2, 0.0)  # nothing is submitted
    assert {f.what: f.state for f in found} == {'queue debug': 'bad', 'queue gone': 'bad'}
    says = {f.what: f.says for f in found}
    assert says['queue debug'] == (
        f'{path}, line 7 is out of date: maximum number of nodes is 8 there, 2 to the scheduler'
    )
    assert f'{path}, line 8 is out of date: ' in says['queue gone']
    assert "'gone'; it has " in says['queue gone']


def test_what_keeps_all_blocks_away_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A drained partition, GPUs that its nodes do not have, and jobs that may not be seen."""
    scontrol = """case "$*" in *partition*) echo PartitionName=gpu State=DRAIN ;;
        *config*) echo "PrivateData             = cloud,jobs" ;; esac"""
    sinfo = 'echo "gpu|allocated|(null)|ib|4|9|n1"; echo "old|idle|gpu:4|ib|4|9|n2"'
    programs(tmp_path / 'bin', monkeypatch, scontrol=scontrol, sinfo=sinfo, squeue='true')
    table = tmp_path / 'site.toml'
    for settings, says in (
        ('gpus_per_node = 4', "gpus_per_node is 4, and no node of the queue 'gpu' has more than 0"),
        ("constraint = 'a&b|c'", "'gpu' has what the site config asks for: a&b or c"),
    ):
        table.write_text(f'[slurm]\npartition = "gpu"\n{settings}\n')
        lacks, *notes, _ = examine(str(table), tmp_path, 0, 0.0)
        assert (lacks.state, says in lacks.says) == ('bad', True)
        hidden, stopped = sorted(note.says for note in notes if note.state == 'note')
        assert 'hide the jobs of others' in hidden and 'starts no jobs now' in stopped
        assert main(['plan', '--site', str(table)]) == 0
        assert 'There are no holes: ' in caplog.text and says in caplog.text.splitlines()[-1]


@pytest.mark.slurm
def test_a_file_that_is_out_of_date(slurm: Cluster, tmp_path: Path) -> None:
    wrong_file_is_told(tmp_path, 'SlurmSite')


@pytest.mark.long
@pytest.mark.slurm
def test_on_slurm(slurm: Cluster, tmp_path: Path) -> None:
    status, found = doctor(written(tmp_path, 'SlurmSite'), 2)
    assert status == 0, found
    assert [f['state'] for f in found] == ['ok'] * len(found), found
    assert found[-1]['says'] == 'all 2 reach each other'
    assert sum('torch' in f['says'] for f in found) == 2


@pytest.mark.slurm
def test_settings_in_a_table_are_compared_too(slurm: Cluster, tmp_path: Path) -> None:
    table = tmp_path / 'site.toml'
    table.write_text('[slurm]\npartition = "debug"\nmost_nodes = 3\n')
    assert [f.says for f in examine(str(table), tmp_path, 0, 0.0)] == [
        f"{table}, line 3 is out of date: most_nodes is 3, and the queue 'debug' takes at most 2"
    ]


@pytest.mark.long
@pytest.mark.pbs
def test_on_pbs(openpbs: PbsCluster, tmp_path: Path) -> None:
    wrong_file_is_told(tmp_path, 'PbsSite')
    # As PBS's own on the nodes of ALCF.
    long = tmp_path / ('x' * 80)
    long.mkdir()
    status, found = doctor(written(tmp_path, 'PbsSite', tmp=str(long)), 1)
    assert status == 1
    [bad] = [f['says'] for f in found if f['state'] == 'bad']
    assert f'no socket can be made in TMPDIR={long}' in bad
    assert 'here.py, line 11 must set a short one' in bad


def node(**more: Any) -> dict[str, Any]:
    known = {'node': 'n1', 'torch': {'version': '2', 'import_s': 3.0}, 'accelerators': 4}
    return {**known, 'tmpdir': {'folder': '/tmp', 'error': ''}, **more}


@pytest.mark.parametrize(
    ('seen', 'reached', 'asked', 'bad'),
    [
        ([node()], [('n1', [])], 1, ''),
        ([node(accelerators=3)], [], 1, 'line 2 is out of date: gpus_per_node is 4, and torch see'),
        ([node(address_error='hsn9: none')], [], 1, 'line 3 is out of date: hsn9'),
        ([node(torch={'error': 'no module'})], [], 1, 'torch cannot be used: no module'),
        ([node()], [('n1', ['n2'])], 1, 'n1 does not reach n2'),
        ([node()], [], 2, '1 of 2 nodes have answered'),
    ],
)
def test_what_nodes_see(
    tmp_path: Path,
    seen: list[dict[str, Any]],
    reached: list[tuple[str, list[str]]],
    asked: int,
    bad: str,
) -> None:
    file = tmp_path / 'site.toml'
    file.write_text('partition = "gpu"\ngpus_per_node = 4\ninterface = "hsn9"\n')
    options = SlurmOptions(partition='gpu', gpus_per_node=4)
    found = of_nodes(SiteFile(file), options, seen, reached, asked)
    said = [one.says for one in found if one.state == 'bad']
    assert len(said) == bool(bad)
    assert all(bad in one for one in said)


def test_a_part_of_a_queue_may_have_narrower_limits(tmp_path: Path) -> None:
    file = tmp_path / 'here.py'
    file.write_text("QUEUES = {'batch': ...}\n")
    limits = QueueLimits((1, 91), (60, 7200), jobs=4)
    for told, states in (
        (Partition('batch', most_nodes=9472, longest_s=7200), ['note', 'ok']),
        (Partition('batch', most_nodes=64, longest_s=7200), ['bad', 'bad']),
        (Partition('batch', most_nodes=91, least_nodes=2), ['bad', 'bad']),
        (Partition('batch'), ['ok', 'ok']),
    ):
        found = [of_queue(SiteFile(file), 'batch', limits, told, whole=w) for w in (True, False)]
        assert [one.state for [one] in found] == states
