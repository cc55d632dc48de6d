"""BFTrainer's published optimiser (FOLDER/progMIP.py) on problems of ``freetrain allocate``:
``python bftrainer.py FOLDER LIMIT_S`` prints nodes, status and CPU time of each as JSON.
"""

import contextlib
import importlib
import io
import json
import sys
import time
from typing import Any

import numpy as np


def answer(optimiser: Any, problem: dict[str, Any], limit_s: float) -> dict[str, Any]:
    trainers, nodes = problem['trainers'], problem['nodes']
    present = np.zeros((len(trainers), nodes), dtype=int)
    at = 0
    for row, trainer in zip(present, trainers, strict=True):
        row[at : at + trainer['current_nodes']] = 1
        at += trainer['current_nodes']
    columns = ('min_nodes', 'max_nodes', 'nodes', 'rate')
    costs = ('rescale_up_s', 'rescale_down_s')
    low, high, counts, rates, up, down = (
        [trainer[column] for trainer in trainers] for column in (*columns, *costs)
    )
    began = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        status, found, *_ = optimiser.re_allocate(
            present, low, high, counts, rates, problem['horizon_s'], up, down, limit_s
        )
    used = time.process_time() - began
    # It gives all nodes away where it has not proved its answer; its replayer then changes nothing.
    taken = found if status.name == 'OPTIMAL' else present
    return {'nodes': taken.sum(axis=1).tolist(), 'status': status.name, 'cpu_s': used}


def main(folder: str, limit_s: str) -> None:
    sys.path.insert(0, folder)
    optimiser = importlib.import_module('progMIP')
    out = sys.stdout.fileno()
    with open(out, 'w', closefd=False) as answers:
        for line in sys.stdin:
            print(json.dumps(answer(optimiser, json.loads(line), float(limit_s))), file=answers)
            answers.flush()


if __name__ == '__main__':
    main(*sys.argv[1:])
