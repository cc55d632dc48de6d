"""The tests share :mod:`tests.support`. Bytecode is kept, for hundreds of interpreters."""

import os
import sys

os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
sys.dont_write_bytecode = False
