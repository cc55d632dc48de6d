"""Questions to Slurm with answers as JSON documents, and what they say; for Slurm 22.05 and later.

22.05 gives plain numbers, and a state is one word. 23.02 and later wrap numbers in
``{"set", "infinite", "number"}``. Since 23.11 a state is a list of words. The shape of a document
shows which it is.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from parsl_freetrain.sites.batch.records import BatchJob, Nodes, NotUnderstood, as_documented
from parsl_freetrain.sites.slurm.answers_text import (
    choices_of,
    features_of,
    gpus_of,
    is_blocked,
    tasks_of,
)
from parsl_freetrain.sites.slurm.hostlist import expand
from parsl_freetrain.sites.slurm.states import end_of, state_of

JOBS = ('squeue', '--json', '--all', '--states=all')
NODES = ('sinfo', '--json', '--all')

# The document on jobs of 22.05 leaves out which nodes are planned for a pending job.
FIRST_COMPLETE = (23, 2)

# Flags of a node that do not keep it from running a job; any other one does.
_HARMLESS_FLAGS = {'PLANNED', 'CLOUD', 'DYNAMIC_NORM', 'DYNAMIC_FUTURE'}


def parse_jobs(answer: str) -> tuple[BatchJob, ...]:
    """Jobs of a ``squeue --json`` document.

    Raises
    ------
    NotUnderstood
        It is not such a document, or it leaves out what holes are made from.
    """
    with as_documented('squeue --json'):
        return tuple(_job(job) for job in _document(answer, 'squeue --json')['jobs'])


def _job(job: dict[str, Any]) -> BatchJob:
    state = _words(job['job_state'])
    if state[0] == 'PENDING' and 'scheduled_nodes' not in job:
        raise NotUnderstood(
            'the document of squeue --json does not tell the planned nodes of pending jobs'
        )
    # COMPLETING, CONFIGURING and the like stand behind the base state, and say more.
    word = next(
        (
            extra
            for extra in state[1:]
            if extra in ('COMPLETING', 'CONFIGURING', 'STAGE_OUT', 'SIGNALING')
        ),
        state[0],
    )
    end = _number(job['end_time'])
    preempted = _number(job.get('preempt_time', 0))
    gres = job.get('tres_per_node') or ''
    return BatchJob(
        str(job['job_id']),
        end_of(state_of(word), *_exit(job.get('exit_code'))),
        job['partition'],
        int(_number(job['node_count']) or 0),
        _number(job['start_time']),
        end,
        expand(job.get('scheduled_nodes') or ''),
        expand(job.get('nodes') or ''),
        job['user_name'],
        'Preempted' if preempted else job['state_reason'],
        job['name'],
        int(_number(job.get('restart_cnt', 0)) or 0),
        limit_s=None if (minutes := _number(job.get('time_limit'))) is None else 60 * minutes,
        priority=_number(job.get('priority')) or 0.0,
        blocked=is_blocked(job['state_reason'], job.get('resv_name') or ''),
        only=expand(job.get('required_nodes') or ''),
        excluded=expand(job.get('excluded_nodes') or ''),
        features=choices_of(job.get('features') or '', gres),
        gpus=gpus_of(gres),
        tasks=tasks_of(job.get('array_task_string') or ''),
    )


def parse_nodes(answer: str) -> tuple[Nodes, ...]:
    """Nodes of a ``sinfo --json`` document: a list of nodes in 22.05, of groups of nodes in 23.02
    and later.

    Raises
    ------
    NotUnderstood
        It is not such a document.
    """
    document = _document(answer, 'sinfo --json')
    with as_documented('sinfo --json'):
        if 'sinfo' in document:
            return tuple(_group(group) for group in document['sinfo'])
        return _merged(document['nodes'])


def _group(group: dict[str, Any]) -> Nodes:
    state, marks = _state(_words(group['node']['state']))
    return Nodes(
        group['partition']['name'],
        tuple(group['nodes']['nodes']),
        state,
        marks,
        features_of(
            group['features']['active'] or group['features']['total'], group['gres']['total']
        ),
        gpus_of(group['gres']['total']),
    )


def _merged(nodes: list[dict[str, Any]]) -> tuple[Nodes, ...]:
    alike: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for node in nodes:
        state, marks = _state([node['state'], *node['state_flags']])
        features = features_of(node['active_features'] or node['features'], node['gres'])
        for partition in node['partitions']:
            alike[partition, state, marks, features, gpus_of(node['gres'])].append(node['name'])
    return tuple(
        Nodes(partition, tuple(names), state, marks, features, gpus)
        for (partition, state, marks, features, gpus), names in alike.items()
    )


def _state(words: list[str]) -> tuple[str, str]:
    base, flags = words[0].lower(), [word.upper() for word in words[1:]]
    if base == 'idle' and 'PLANNED' in flags:
        base = 'planned'
    return base, ''.join('?' for flag in flags if flag not in _HARMLESS_FLAGS)


def _words(state: str | list[str]) -> list[str]:
    words = [state] if isinstance(state, str) else state
    if not words:
        raise NotUnderstood('a state in the document is empty')
    return words


def _exit(code: Any) -> tuple[int, int]:
    """Exit status and signal of an exit code: in 22.05 a number as of ``wait``."""
    if isinstance(code, dict):
        number = code.get('signal') or {}
        number = number.get('id', number.get('signal_id'))
        return int(_number(code.get('return_code')) or 0), int(_number(number) or 0)
    return (code or 0) >> 8, (code or 0) & 0x7F


def _number(value: Any) -> float | None:
    """A plain number, or one that says whether it is set; 0 counts as not set, as no time and no
    count is 0.
    """
    if isinstance(value, dict):
        value = value['number'] if value['set'] and not value['infinite'] else None
    return float(value) if value else None


def _document(answer: str, command: str) -> dict[str, Any]:
    try:
        document = json.loads(answer)
    except ValueError as error:
        raise NotUnderstood(f'{command} did not answer with a JSON document: {error}') from error
    if not isinstance(document, dict):
        raise NotUnderstood(f'{command} did not answer with a JSON object')
    return document
