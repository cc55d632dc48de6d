"""The tests; a package, so that tests can import what they share from :mod:`tests.support`.

They start hundreds of interpreters, which import the same modules, so bytecode is kept even where
the user's shell says otherwise.
"""

import os
import sys

os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
sys.dont_write_bytecode = False
