"""Print the folder that goes on PYTHONPATH."""

from __future__ import annotations

from parsl_freetrain.executor.globus_registration import FOLDER

if __name__ == '__main__':
    print(FOLDER)
