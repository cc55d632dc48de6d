"""Blocks that outlive the submitting process, and the next run of the work that goes on in them."""

import hashlib
import logging
import shlex
from pathlib import Path
from typing import NamedTuple

from parsl_freetrain.core.model.types import BlockRequest
from parsl_freetrain.executor.parsl_side import ParslSide
from parsl_freetrain.sites.protocols import Adopting
from parsl_freetrain.sites.provider import BackfillProvider
from parsl_freetrain.training.process.block_lease import release, this_process, write_holder

logger = logging.getLogger(__name__)

NODE = 'python3 -P -m parsl_freetrain.training.process.node_agent'
TEMPLATE = ' --template {}'
"""Option of it: the nodes import torch themselves, and write the logs of that into a folder."""


class AdoptedBlock(NamedTuple):
    """A block of an earlier run under the id that it has in this one."""

    block: str
    job_id: str
    request: BlockRequest


class Adoption:
    """Blocks of successive runs of a folder and label; they wait ``wait_s`` for the next one."""

    def __init__(
        self, provider: BackfillProvider, folder: Path, label: str, run: str, wait_s: float
    ) -> None:
        self._provider, self._run, self._wait_s = provider, run, wait_s
        self._site = provider.site if isinstance(provider.site, Adopting) and wait_s > 0 else None
        self._name = hashlib.sha256(f'{folder.resolve()}\0{label}'.encode()).hexdigest()[:12]
        self._path = folder.absolute() / f'holder-{self._name}.json'

    def begin(self) -> None:
        """Name this run's blocks; before the site starts."""
        if self._site is not None:
            self._site.identify(self._name)

    def node_command(self) -> str:
        """What a node's command begins with; its signals become notices to the fragments there."""
        if self._site is None:
            return NODE
        return (
            f'{NODE} --holder {shlex.quote(str(self._path))} --job-variable '
            f'{self._site.job_variable} --wait {self._wait_s:g}'
        )

    def take_over(self, parsl: ParslSide) -> list[AdoptedBlock]:
        """Adopt what an earlier run left, and tell its nodes; or FreeTrainError, if unanswered."""
        if self._site is None:
            return []
        adopted, commands = [], {}
        for job_id, request in self._provider.adopt().items():
            block, commands[job_id] = parsl.register(job_id)
            adopted.append(AdoptedBlock(block, job_id, request))
        if adopted:
            logger.info('Going on with the blocks %s of an earlier run', ', '.join(commands))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_holder(self._path, this_process(self._run, commands))
        return adopted

    def end(self) -> None:
        if self._site is not None:
            release(self._path, self._run)
