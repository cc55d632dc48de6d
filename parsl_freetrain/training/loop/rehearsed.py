"""What a rehearsal does in a rank: steps are noted, and the rank is stopped or killed at some."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Subset

from parsl_freetrain.training.data.loader_settings import LoaderData
from parsl_freetrain.training.loop.loop_state import Phase

if TYPE_CHECKING:
    from parsl_freetrain.training.loop.fragment_run import FragmentRun


class RehearsedSteps:
    def __init__(self, run: 'FragmentRun') -> None:
        assert run.order.rehearsed is not None
        self._run, self._says, self._state = run, run.order.rehearsed, run.state
        self._steps, self._seen, self._saved_at = 0, -1, 0

    def data(self, data: LoaderData) -> LoaderData:
        workers = self._says.workers
        return data if workers is None else replace(data, num_workers=workers)

    def shortened(self, data: LoaderData) -> LoaderData:
        most = self._says.epoch_steps * data.batch_size
        few: Any = Subset(data.dataset, range(most))
        return replace(data, dataset=few) if len(data.dataset) > most else data

    def follow(self, batches: Iterator[Any], workers: int) -> Iterator[Any]:
        says, state = self._says, self._state
        for batch in batches:
            loop, samples = self._run.lengths.loops, state.samples
            if samples != self._seen and state.phase is not Phase.STOPPED:
                self._seen, self._steps = samples, self._steps + 1
                if self._run.is_main:
                    with Path(says.trace).open('a') as file:
                        file.write(json.dumps([loop, samples, state.epoch, workers]) + '\n')
                    if says.batches:
                        torch.save(batch, Path(says.batches, f'{samples:012d}'))
                self._cut(samples)
            yield batch

    def _cut(self, samples: int) -> None:
        says = self._says
        if says.cut is not None and samples >= says.cut:
            if not says.kill:
                os.kill(os.getpid(), signal.SIGTERM)
            elif not self._saved_at:
                self._saved_at = self._steps
                self._run.checkpointer.timing.want_soon()
            elif self._steps > self._saved_at + 1:  # the digest of the step between is known
                self._run.checkpointer.settled()
                self._run.verification.settle()
                os.kill(os.getpid(), signal.SIGKILL)
        elif samples >= says.until if says.until is not None else self._steps >= says.steps:
            os.kill(os.getpid(), signal.SIGTERM)
