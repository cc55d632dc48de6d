"""Parsl's own test suite against FreeTrainExecutor and against its HighThroughputExecutor."""

import os
import sys
import xml.etree.ElementTree as Xml
from pathlib import Path

import parsl
import pytest

from tests.support.programs import run_to_end

HERE = Path(__file__).resolve().parent
SUITE = Path(parsl.__file__).parent / 'tests'
PARTS = ('test_python_apps', 'test_bash_apps', 'test_error_handling')
DECIDED_BY_TIME = 'test_timeout'
"""Parsl's test that an app's thread is interrupted within some milliseconds: on a busy computer it
fails with Parsl's own executor too."""


def run_suite(config: str, folder: Path) -> dict[str, bool]:
    """Run the suite with a configuration; whether each test that was not skipped passed."""
    folder.mkdir()
    report = folder / 'report.xml'
    command = [
        sys.executable,
        '-m',
        'pytest',
        '-c',
        '/dev/null',
        '--rootdir',
        str(SUITE),
        '-p',
        'no:cacheprovider',
        '-q',
        '--noconftest',
        '-p',
        'tests.conformance.parsl_plugin',
        '--config',
        str(HERE / config),
        '--basetemp',
        str(folder / 'tmp'),
        f'--junitxml={report}',
        *(str(SUITE / part) for part in PARTS),
    ]
    left_out = [DECIDED_BY_TIME]
    if os.geteuid() == 0:
        # It may write where these two expect to be refused, and would leave things there.
        left_out += ['test_bad_stdout_file', 'test_bad_stderr_file']
    command += ['-k', ' and '.join(f'not {name}' for name in left_out)]
    environment = {**os.environ, 'FREETRAIN_CONFORMANCE_DIR': str(folder)}
    environment['PYTHONPATH'] = str(HERE.parents[1])
    done = run_to_end(command, cwd=folder, env=environment)
    assert report.exists(), done.stdout + done.stderr
    results: dict[str, bool] = {}
    for case in Xml.parse(report).iter('testcase'):
        found = {child.tag for child in case}
        name = f'{case.get("classname")}::{case.get("name")}'
        if 'skipped' not in found:
            results[name] = results.get(name, True) and found.isdisjoint({'failure', 'error'})
    assert results, done.stdout + done.stderr
    print(done.stdout[-1500:])
    return results


@pytest.mark.long
def test_what_works_with_parsls_executor_works_with_ours(tmp_path: Path) -> None:
    ours = run_suite('freetrain_config.py', tmp_path / 'freetrain')
    failed = {name for name, passed in ours.items() if not passed}
    assert sum(ours.values()) >= 100
    if failed:
        stock = run_suite('stock_config.py', tmp_path / 'stock')
        assert stock.keys() >= ours.keys()
        assert {name for name in failed if stock[name]} == set()
