"""Parsl's own conftest.py as a plugin, without the hook whose signature pytest 9 refuses."""

from parsl.tests import conftest

LEFT_OUT = {'pytest_ignore_collect'}  # it leaves out folders that are not asked for here

here = {name for name in vars(conftest) if not name.startswith('__')} - {*LEFT_OUT}
globals().update({name: vars(conftest)[name] for name in here})
