"""What the documentation shows at a prompt runs, and says what is shown; of the commands of
``ELSEWHERE``, only the words are checked, against the verb's options.
"""

import importlib
import io
import re
import sys
from pathlib import Path

import pytest

from parsl_freetrain.cli.main import VERBS, main
from tests.support.pages import Command, all_blocks, as_shown, commands, name_of, pages
from tests.support.prepared import prepare
from tests.support.programs import run_to_end

# Commands by their beginning, and why they are not run here.
ELSEWHERE = {
    'make ': 'each make target has tests of its own; that it exists is checked by '
    'tests/test_house.py',
    '. .venv/bin/activate': 'is for the shell of a user',
    'freetrain run workflows/hpo.py': 'run by tests/test_workflows.py, shorter',
    'freetrain new first': 'run by tests/cli/test_new.py',
    'freetrain run first/train.py': 'run by tests/cli/test_new.py',
    'freetrain run train.py': 'run by tests/docs/test_python_blocks.py, tests/slurm and tests/pbs',
    'git clone': 'needs this repository elsewhere',
    'freetrain run mine.py --site local': 'run by tests/cli/test_run.py',
    'freetrain doctor --checkpoints /scratch/me': 'needs a folder of a supercomputer; '
    'tests/cli/test_doctor.py runs the verb',
    'freetrain plan --site my_site.toml': 'needs a batch scheduler: tests/cli/test_holes.py, '
    'tests/docs/test_guides.py',
    'freetrain run workflow.py --site': 'needs a batch scheduler: tests/docs/test_guides.py',
    'freetrain report --ledger /scratch': 'names a folder of a supercomputer; '
    'tests/cli/test_report.py runs the verb',
    'freetrain watch --web': 'goes on until Ctrl-C: tests/cli/live/test_web.py',
    'ssh ': 'leads to another computer',
    'freetrain replay --ledger': 'needs the ledger of a live run: '
    'tests/replay/test_recorded_run.py',
    'freetrain rehearse train.py': 'run by tests/test_rehearsal.py',
    'freetrain preempt': 'needs a run that lives: tests/docs/test_guides.py',
    'python -m tests.chaos.sharded': 'takes ten minutes: tests/chaos/test_chaos.py',
    'python -m tests.simulation.test_simulation': 'takes an hour: tests/simulation',
}
# Pages whose commands are run by another test, all of them in order.
WHOLE_PAGES = {
    'guides/first-site.md': 'on a real Slurm cluster, by tests/docs/test_guides.py',
    'guides/preemption.md': 'on a run that lives, by tests/docs/test_guides.py',
}
# Commands whose figures are those of another machine or of another time: their words are compared,
# not their numbers.
LOOSELY = ('freetrain replay', 'freetrain status', 'freetrain why')

WORKFLOW = 'python -m workflows.'
COMMANDS = [command for page in pages() for command in commands(page)]


def elsewhere(command: Command) -> bool:
    return command.page in WHOLE_PAGES or any(
        command.text.startswith(beginning) for beginning in ELSEWHERE
    )


HERE = [command for command in COMMANDS if not elsewhere(command)]


def text_commands() -> list[Command]:
    """Lines of plain blocks that call ``freetrain`` or a workflow: checked as words only."""
    return [
        Command(block.page, block.line, line, '')
        for block in all_blocks('text')
        for line in re.sub(r'\\\n +', '', block.code).splitlines()
        if line.startswith(('freetrain ', WORKFLOW))
    ]


def perform(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str]:
    """Run ``freetrain`` here, anything else in a process; exit status, and what was said."""
    if '<' in words:
        at = words.index('<')
        monkeypatch.setattr(
            sys, 'stdin', io.TextIOWrapper(io.BytesIO(Path(words[at + 1]).read_bytes()))
        )
        words = words[:at] + words[at + 2 :]
    if 'study.toml' in words:
        # As many processes as cores would take longer than the few replays.
        words = [*words, '--jobs', '1']
    if words[0] == 'freetrain':
        capsys.readouterr()
        status = main(words[1:])
        said = capsys.readouterr()
        return status, said.out + said.err
    assert words[0] == 'python', words
    done = run_to_end([sys.executable, *words[1:]])
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize('command', HERE, ids=str)
def test_commands_do_what_is_shown(
    command: Command,
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare(run_dir)
    monkeypatch.setenv('COLUMNS', '100')
    status, said = perform(command.words, capsys, monkeypatch)
    assert status == (2 if re.search(r'^freetrain: ', command.shown, re.MULTILINE) else 0), said
    if command.shown:
        assert as_shown(command.shown, said, loosely=command.text.startswith(LOOSELY)), said


SHOWN = [*COMMANDS, *text_commands()]


@pytest.mark.parametrize('command', [c for c in SHOWN if c.words[0] == 'freetrain'], ids=str)
def test_verbs_and_options_exist(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of commands that are not run here, too."""
    monkeypatch.setenv('COLUMNS', '400')
    verb = command.words[1]
    assert verb in VERBS
    assert main([verb, '--help']) == 0
    known = set(re.findall(r'--[a-z-]+|(?<= )-[a-z](?= )', capsys.readouterr().out))
    own = (
        command.words[2 : command.words.index('--')] if '--' in command.words else command.words[2:]
    )
    assert {word.split('=')[0] for word in own if re.match(r'--?[a-z]', word)} <= known


@pytest.mark.parametrize('command', [c for c in SHOWN if c.text.startswith(WORKFLOW)], ids=str)
def test_options_of_workflows_exist(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ``[--size small|large] [--site NAME|FILE]``: the options, and what they take."""
    monkeypatch.setenv('COLUMNS', '400')
    workflow = importlib.import_module(command.words[2])
    with pytest.raises(SystemExit, match='^0$'):
        workflow.main(['--help'])
    said = capsys.readouterr().out
    shown = command.text.split()[3:]
    assert shown and all(
        word.strip('[]') in said.replace('[', ' ').split()
        for word in shown
        if word.startswith(('--', '[--'))
    )
    either = [word.strip('[]') for word in shown if '|' in word]
    assert all((word if word.isupper() else word.replace('|', ',')) in said for word in either)


def test_commands_are_in_fences() -> None:
    """One that is only indented is seen by none of these tests."""
    assert not [
        f'{name_of(page)}: {line}'
        for page in pages()
        for line in page.read_text().splitlines()
        if re.match(r' {4}(python|freetrain|make) ', line)
    ]


def test_what_is_not_run_here_is_shown_somewhere() -> None:
    """No line of the lists above has outlived the page that it is for."""
    texts = [command.text for command in COMMANDS]
    assert all(any(text.startswith(beginning) for text in texts) for beginning in ELSEWHERE)
    assert set(WHOLE_PAGES) <= {name_of(page) for page in pages()}
