"""The house is in order: files, dependencies, links, what the README promises."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hypothesis
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.pages import pages
from tests.support.programs import run_to_end
from tests.support.scheduling import FIRST, PBS, SLURM
from tests.support.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parent.parent
TOP = {'pyproject.toml', 'parsl_freetrain', 'workflows', 'site_configs', 'tests', 'docs', 'LICENSE'}
TOP |= {'README.md', 'CHANGELOG.md', 'CONTRIBUTING.md', 'Makefile'}
# Distribution of a module where the names differ, and what is needed without being imported.
DISTRIBUTIONS = {'zmq': 'pyzmq', 'sklearn': 'scikit-learn', 'mlflow': 'mlflow-skinny'}
DISTRIBUTIONS['globus_compute_sdk'] = 'globus-compute-sdk'
CALLED_BY_OTHERS = {'tensorboard'}
# Extras that a module needs.
OF_MODULES = ['globus', 'lightning', 'mlflow', 'optuna', 'proxystore', 'replay', 'tensorboard']
OF_MODULES += ['transformers', 'wandb']


def modules(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob('*.py'))]


def test_top_level_holds_only_what_belongs_there() -> None:
    tracked = git('ls-files', '--cached', '--others', '--exclude-standard')
    here = {path.split('/')[0] for path in tracked}
    assert {name for name in here if not name.startswith('.')} <= TOP


def git(*arguments: str) -> list[str]:
    if not (ROOT / '.git').exists():
        pytest.skip('needs the git repository')
    # The repository may belong to another user, in a container for instance.
    done = run_to_end(['git', '-c', f'safe.directory={ROOT}', *arguments], cwd=ROOT, check=True)
    return done.stdout.splitlines()


def test_modules() -> None:
    """Each says what it is for by its name and its docstring."""
    wrong = [
        f'{path.relative_to(ROOT)}: {what}'
        for path in modules('parsl_freetrain', 'workflows', 'site_configs')
        for what in faults(path)
    ]
    assert not wrong, '\n'.join(wrong)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def faults(path: Path) -> Iterator[str]:
    if re.search(r'util|helper|misc|common', path.stem):
        yield 'its name says nothing'
    if not ast.get_docstring(parsed(path)):
        yield 'no docstring'


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_the_house_stays_small() -> None:
    """A number here may sink, and rises only where something that is kept is worth it."""
    package, tests = modules('parsl_freetrain'), modules('tests')
    assert sum(map(lines, package)) <= 58_000
    assert sum(map(lines, tests)) <= 55_000
    assert len(package) <= 380
    large = [str(path.relative_to(ROOT)) for path in package if lines(path) > 400]
    assert not large
    long = [f'{path.relative_to(ROOT)}: {name}' for path in package for name in long_ones(path)]
    assert not long, '\n'.join(long)


def long_ones(path: Path, most: int = 60) -> Iterator[str]:
    """Functions of more lines than ``most``, apart from their docstrings."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            said = node.body[0] if ast.get_docstring(node) else None
            docstring = 0 if said is None else (said.end_lineno or 0) - said.lineno + 1
            if (node.end_lineno or 0) - node.lineno + 1 - docstring > most:
                yield node.name


def test_tests_install_nothing_on_this_computer() -> None:
    """``make system-packages`` does."""
    programs = [*modules('tests'), *(ROOT / 'tests' / 'support').glob('*-cluster')]
    assert not [path for path in programs if 'apt' + '-get' in path.read_text()]


def test_files_that_are_begun_first_exist() -> None:
    assert not [file for file in FIRST if not (ROOT / file).is_file()]
    assert {PBS, SLURM} <= {*FIRST}, 'they stand for others, too'


def test_dependencies_are_those_that_are_imported() -> None:
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    declared = {re.split(r'[<>=!~ \[]', line)[0].lower() for line in project['dependencies']}
    extras = {
        re.split(r'[<>=!~ \[]', line)[0].lower()
        for extra in OF_MODULES
        for line in project['optional-dependencies'][extra]
    }
    assert imported('parsl_freetrain') == (declared | extras) - CALLED_BY_OTHERS
    demo = {re.split(r'[<>=!~ \[]', s)[0].lower() for s in project['optional-dependencies']['demo']}
    assert imported('workflows', 'site_configs') <= declared | demo


def imported(*folders: str) -> set[str]:
    """Distributions, other than ours and Python's, that modules in these folders import."""
    found = set()
    for path in modules(*folders):
        for node in ast.walk(parsed(path)):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else (
                    [node.module or '']
                    if isinstance(node, ast.ImportFrom) and not node.level
                    else []
                )
            )
            found |= {name.split('.')[0] for name in names}
    outside = (
        found
        - set(sys.stdlib_module_names)
        - {'parsl_freetrain', 'workflows', 'site_configs', '_typeshed'}
    )
    return {DISTRIBUTIONS.get(name, name) for name in outside}


def test_constraints_pin_every_dependency() -> None:
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    wanted = [
        *project['dependencies'],
        *(line for extra in project['optional-dependencies'].values() for line in extra),
    ]
    lines = (ROOT / '.ci' / 'constraints.txt').read_text().splitlines()
    pinned = {
        line.split('==')[0].lower().replace('_', '-') for line in lines if not line.startswith('#')
    }
    assert {re.split(r'[<>=!~ \[]', line)[0].lower() for line in wanted} <= pinned
    assert all(re.fullmatch(r'[\w.-]+==[\w.]+|#.*', line) for line in lines), (
        'exact versions without local tags only'
    )


def test_the_lowest_versions_are_those_that_are_tested() -> None:
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    needed = [*project['dependencies'], *project['optional-dependencies']['replay']]
    bounds = {one.name: one for one in map(Requirement, needed)}
    lines = (ROOT / '.ci' / 'constraints-lowest.txt').read_text().splitlines()
    tested = {
        one.name: next(iter(one.specifier)).version
        for one in map(Requirement, [line for line in lines if not line.startswith('#')])
    }
    assert tested.keys() == bounds.keys()
    for name, version in tested.items():
        [bound] = bounds[name].specifier
        # The first release of what the bound names, such as 1.7.1 of >=1.7.
        assert bound.operator == '>='
        assert Version(version).release[: len(Version(bound.version).release)] == (
            Version(bound.version).release
        )


def test_make_commands_in_the_texts_exist() -> None:
    targets = set(re.findall(r'^([a-z-]+):', (ROOT / 'Makefile').read_text(), re.MULTILINE))
    texts = pages()
    named = {
        command
        for text in texts
        for command in re.findall(r'(?:`|^ *|\$ )make ([a-z-]+)', text.read_text(), re.MULTILINE)
    }
    assert {'demo', 'test'} <= named <= targets


@pytest.mark.parametrize(
    ('failing', 'status', 'packages'),
    [
        ('', 0, 1),
        ('test-long', 0, 1),
        ('test', 7, 1),
        ('lint', 7, 1),
        ('system-packages', 7, 1),
        ('few-packages', 0, 0),  # what cannot be installed is not run
        ('test-few-packages', 7, 2),
        ('lint test-long', 7, 1),
    ],
)
def test_ci_runs_what_failed_again(
    tmp_path: Path, failing: str, status: int, packages: int
) -> None:
    """Tests run also where style or documentation fail; a second run has only what failed."""
    fake, calls = tmp_path / 'make', tmp_path / 'calls'
    fake.write_text(
        f'#!/bin/bash\necho "$*" >> "{calls}"\nfor word in "$@"; do\n'
        f'case " {failing} " in *" $word "*) exit 7;; esac\ndone\n'
    )
    fake.chmod(0o700)
    env = {**os.environ, 'PATH': f'{tmp_path}:{os.environ["PATH"]}'}
    ci = [ROOT / '.ci' / 'run']
    done = subprocess.run(ci, env=env, cwd=tmp_path, timeout=LIMIT_S, check=False)
    assert done.returncode == status
    first, *rest = calls.read_text().splitlines()
    assert first.endswith(' system-packages venv')
    beside, after = rest[: (place := rest.index('test'))], rest[place + 1 :]
    assert beside.count('test-few-packages') == packages and beside.count('few-packages') == 1
    assert [it for it in beside if it.endswith(' lint docs')]
    assert after.pop(0) == 'test-long' and len(after) == bool(re.search('test(-long)?$', failing))
    again = 'test TEST_ARGS=--last-failed --last-failed-no-failures none'
    assert all(it.startswith(again) for it in after)


def test_make_says_which_python_it_needs(tmp_path: Path) -> None:
    old = tmp_path / 'python-old'
    old.write_text(
        f'#!/bin/sh\nshift\nexec {sys.executable} -c '
        f"\"import sys; sys.version_info = type('V', (tuple,), {{}})((3, 10, 1)); "
        'exec(sys.argv[1])" "$1"\n'
    )
    old.chmod(0o700)
    done = run_to_end(
        ['make', '-C', str(ROOT), f'VENV={tmp_path / "venv"}', f'PYTHON={old}', 'venv']
    )
    assert done.returncode != 0
    assert 'needs Python 3.11 or newer' in done.stderr
    assert not (tmp_path / 'venv').exists()


def test_no_property_test_has_a_deadline() -> None:
    assert hypothesis.settings().deadline is None
    assert hypothesis.HealthCheck.too_slow in hypothesis.settings().suppress_health_check
