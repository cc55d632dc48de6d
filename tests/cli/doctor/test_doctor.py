"""``freetrain doctor``: real measurements, and what is made of bad ones."""

import copy
import json
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain.cli.doctor.checks import findings
from parsl_freetrain.cli.doctor.measuring import imports, once_each, programs
from parsl_freetrain.cli.main import main
from parsl_freetrain.sites.registry import site_types
from parsl_freetrain.training.process.probe import RACES
from tests.support.batch_tests import Rehearsal


@pytest.fixture(scope='module')
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What it writes when the "node" is another process of this computer."""
    folder = tmp_path_factory.mktemp('doctor')
    out = folder / 'report.json'
    how = '--out', str(out), '--through', 'env FREETRAIN_NODE=x'
    status = main(['doctor', '--checkpoints', str(folder), *how])
    found: dict[str, Any] = json.loads(out.read_text())
    assert status == int(any(f['state'] == 'bad' for f in found['findings']))
    assert out.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.iterdir()] == ['report.json']  # its own folders are gone
    return found


def test_what_is_measured_here(document: dict[str, Any]) -> None:
    here, files = document['here'], document['file_system']
    assert here['versions']['python'] == '.'.join(map(str, sys.version_info[:3]))
    assert here['torch']['gloo_works'] and 'gloo' in here['torch']['backends']
    assert files['race'] == {'mkdir': True, 'create': True}
    assert files['rename'] and files['fsync_ms'] > 0 and abs(files['mtime_skew_s']) < 1
    assert files['type'] and files['mount'].startswith('/')
    assert all(f['state'] != 'bad' for f in document['findings']), document['findings']


def test_what_is_measured_between_two_sides(document: dict[str, Any]) -> None:
    node = document['node']
    assert (node['versions'], node['sees_folder']) == (document['here']['versions'], True)
    assert node['race'] == {'mkdir': True, 'create': True}
    assert node['clock_skew_s'] == 0 and node['reaches']


def test_json_and_a_node_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(['doctor', '--json', '--through', 'false']) == 1
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / 'freetrain-doctor.json').read_text())
    [node] = [f for f in found['findings'] if f['what'] == 'node']
    assert node['state'] == 'bad' and 'ended with status 1 and no answer' in node['says']


def changed(document: dict[str, Any], path: str, value: Any) -> dict[str, str]:
    """The findings that are bad, or a new note, when one fact is another."""
    facts = copy.deepcopy(document)
    place = facts
    *way, last = path.split('.')
    for step in way:
        place = place[step]
    place[last] = value
    before = {(f.what, f.state) for f in findings(document)}
    return {f.what: f.says for f in findings(facts) if (f.what, f.state) not in before}


@pytest.mark.parametrize(
    ('path', 'value', 'what', 'words'),
    [
        ('here.versions.torch', None, 'versions here', 'not installed: torch'),
        ('here.torch', {'error': 'ImportError: libfoo'}, 'torch here', 'libfoo'),
        ('here.gpus', ['GPU 0: H100'], 'GPUs here', 'torch sees none'),
        (
            'file_system.race',
            {'mkdir': False, 'create': True},
            'exclusive names',
            'mkdir of one name succeeded twice',
        ),
        ('file_system.mtime_skew_s', -30.0, 'clock of the file server', '-30.00 s'),
        ('file_system.fsync_ms', 900.0, 'fsync', '900.00 ms'),
        ('file_system.free_bytes', 1000, 'free space', '0.0 GiB'),
        ('ports.free', {'54000-55000': 3}, 'ports', '3 free'),
        ('node.versions.torch', '1.0', 'versions there', '1.0 there'),
        ('node.clock_skew_s', 45.0, 'clock there', '+45.00 s'),
        ('node.sees_folder', False, 'shared folder', 'does not see'),
        ('node.race', None, 'shared folder', 'do not see each other'),
        ('node.reaches', [], 'network', 'give the executor an address='),
        ('programs', {'sbatch': {'path': '/x', 'version': ''}}, 'Slurm', 'missing: sinfo'),
    ],
)
def test_what_is_made_of_it(
    document: dict[str, Any], path: str, value: Any, what: str, words: str
) -> None:
    facts = {**document, 'programs': {}}
    found = changed(facts, path, value)
    assert words in found[what], found


def schedulers_found(document: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """What it says of the schedulers whose commands are on the PATH now."""
    facts = {**document, 'programs': programs(site_types().values())}
    labels = {'batch system', *document['schedulers']} - {'Slurm'}  # it may be here
    return {f.what: (f.state, f.says) for f in findings(facts) if f.what in labels}


def test_cobalt_is_not_taken_for_pbs(document: dict[str, Any], cobalt: Rehearsal) -> None:
    """Both have qsub, qstat and qdel."""
    assert schedulers_found(document) == {'Cobalt': ('ok', 'Cobalt 1.0.30')}
    (cobalt.folder / 'bin' / 'showres').unlink()
    assert schedulers_found(document) == {'Cobalt': ('note', 'Cobalt 1.0.30; missing: showres')}
    (cobalt.folder / 'bin' / 'nodelist').unlink()
    assert schedulers_found(document) == {
        'PBS': ('note', 'Cobalt 1.0.30; missing: pbsnodes, pbs_rstat'),
        'Cobalt': ('note', 'Cobalt 1.0.30; missing: nodelist, showres'),
    }


def test_a_machine_with_pbs(document: dict[str, Any], pbs: Path) -> None:
    assert schedulers_found(document) == {'PBS': ('ok', 'pbs_version = 2022.1.1')}


def test_a_name_that_two_have_made_is_noticed() -> None:
    every = list(range(RACES))
    assert once_each(
        [{'mkdir': every[::2], 'create': every}, {'mkdir': every[1::2], 'create': []}]
    ) == {'mkdir': True, 'create': True}
    found = once_each([{'mkdir': every, 'create': every}, {'mkdir': [7], 'create': []}])
    assert found == {'mkdir': False, 'create': True}
    assert once_each([{'mkdir': every[1:], 'create': every}]) == {'mkdir': False, 'create': True}


def test_bad_input_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (['--checkpoints', str(tmp_path / 'no')], 'not a folder that can be written to'),
        (['--checkpoints', str(tmp_path), '--through', '"'], 'is not a command'),
    ):
        assert main(['doctor', *arguments]) == 2
        assert words in capsys.readouterr().err


def test_when_to_pack_the_environment() -> None:
    for facts, state, says in (
        ({'shared_s': 30.0}, 'note', 'BackfillProvider(environment=PackedEnvironment()) pays'),
        ({'shared_s': 9.0}, 'ok', 'imports of many nodes at once take more than 9.5 s'),
        ({'error': 'no venv'}, 'note', 'could not be compared: no venv'),
    ):
        measured = {'prefix': '/p', 'local': '/l', 'bytes': 2**30, 'unpack_s': 5.0, 'local_s': 4.5}
        [found] = findings({'imports': {**measured, **facts}})
        assert found.state == state
        assert says in found.says


def test_imports_are_measured_in_both_places(tmp_path: Path) -> None:
    pytest.importorskip('venv_pack')
    made = tmp_path / 'an environment'
    venv.create(made, symlinks=True)
    found = imports(made, tmp_path, modules=('json',))
    assert found['bytes'] > 0
    assert min(found['shared_s'], found['unpack_s'], found['local_s']) > 0
    assert 'No module named' in imports(made, tmp_path, modules=('parsl',))['error']
    assert 'is no virtual environment' in imports(tmp_path, tmp_path)['error']
    assert [path.name for path in tmp_path.iterdir()] == ['an environment']
