"""Print the folder to put on PYTHONPATH."""

from __future__ import annotations

from parsl_freetrain.executor.globus.registration import FOLDER

if __name__ == '__main__':
    print(FOLDER)
