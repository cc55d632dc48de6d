"""Parsl's own conftest.py as a plugin, without the hook whose signature pytest 9 refuses."""

from parsl.tests import conftest

LEFT_OUT = {'pytest_ignore_collect'}  # it leaves out folders that are not asked for here

globals().update(
    {
        name: thing
        for name, thing in vars(conftest).items()
        if not name.startswith('__') and name not in LEFT_OUT
    }
)
