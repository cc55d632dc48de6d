"""The lower bounds of pyproject.toml are those that ``make test-lowest`` installs."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]


def test_the_lowest_versions_are_those_that_are_tested() -> None:
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    bounds = {one.name: one for one in map(Requirement, project['dependencies'])}
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
