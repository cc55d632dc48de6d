"""The queue of Slurm as a JSON document, for 23.02 and later. Nodes are asked for as text: ``sinfo
--json`` puts nodes together that differ. 22.05 gives plain numbers and states of one word; 23.02
wraps numbers in ``{"set", "infinite", "number"}``; since 23.11 a state is a list.
"""

import json
from typing import Any

from parsl_freetrain.sites.batch.records import (
    BatchJob,
    NotUnderstood,
    after_banner,
    all_of,
    as_documented,
)
from parsl_freetrain.sites.slurm import answers_text as text
from parsl_freetrain.sites.slurm.words import end_of, expand, state_of

JOBS = ('squeue', '--json', '--noheader', '--all', '--states=all')  # or it begins with CLUSTER:

# What stands behind a base state and says more.
_MORE = (
    *('COMPLETING', 'CONFIGURING', 'POWER_UP_NODE', 'STAGE_OUT', 'SIGNALING', 'STOPPED'),
    *('REVOKED', 'REQUEUED', 'REQUEUE_FED', 'REQUEUE_HOLD', 'SPECIAL_EXIT', 'RESV_DEL_HOLD'),
)


def parse_jobs(answer: str) -> tuple[BatchJob, ...]:
    """As :func:`.answers_text.parse_jobs`, of a ``squeue --json`` document."""
    with as_documented('squeue --json'):
        jobs = _document(answer)['jobs']
        if any('scheduled_nodes' not in j and 'PENDING' in j['job_state'] for j in jobs):
            lacks = 'does not tell the planned nodes of pending jobs'
            raise NotUnderstood(f'the document of squeue --json {lacks}')
        return all_of([(str(job['job_id']), job) for job in jobs], _job, 'squeue --json')


def _job(job_id: str, job: dict[str, Any]) -> BatchJob:
    state = _words(job['job_state'])
    word = next((more for more in state[1:] if more in _MORE), state[0])
    reason = job.get('state_description') or job['state_reason']  # as squeue does in its text
    end = _number(job['end_time'])
    preempted = _number(job.get('preempt_time', 0))
    nodes = int(_number(job['node_count']) or 0)
    gres, *more = (job.get(f'tres_per_{what}') or '' for what in ('node', 'socket', 'job', 'task'))
    gpus = text.gpus_on_each(nodes, int(_number(job.get('tasks')) or 1), gres, *more)
    per_gpu = text.gpus_of(job.get('memory_per_tres') or '')  # MiB, told as a number of GPUs is
    # 22.05: one word, or nothing; later a list of words.
    shared = job.get('shared') or ()
    words = (shared,) if isinstance(shared, str) else shared
    whole = bool({'none', 'user', 'mcs', 'topo'}.intersection(words))
    whole |= not words and 'container_type' in job  # 26.05 does not tell it: nodes are given back
    per_cpu, per_node = (_number(job.get(f'memory_per_{unit}')) or 0.0 for unit in ('cpu', 'node'))
    return BatchJob(
        job_id,
        end_of(state_of(word), *_exit(job.get('exit_code'))),
        job['partition'],
        nodes,
        _number(job['start_time']),
        end,
        expand(job.get('scheduled_nodes') or ''),
        expand(job.get('nodes') or ''),
        job['user_name'],
        'Preempted' if preempted else reason,
        job['name'],
        int(_number(job.get('restart_cnt', 0)) or 0),
        limit_s=None if (minutes := _number(job.get('time_limit'))) is None else 60 * minutes,
        priority=_number(job.get('priority')) or 0.0,
        blocked=text.is_blocked(reason, job.get('resv_name') or ''),
        only=expand(job.get('required_nodes') or ''),
        excluded=expand(job.get('excluded_nodes') or ''),
        features=text.choices_of(job.get('features') or '', ','.join((gres, *more))),
        gpus=gpus,
        tasks=text.tasks_of(job.get('array_task_string') or ''),
        cpus=0 if whole else int(_number(job.get('cpus')) or 0),
        step=int(_number(job.get('minimum_cpus_per_node')) or 1),
        memory=per_node or per_cpu or per_gpu * gpus,
        memory_per_cpu=per_cpu,
    )


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
    """A plain number, or one that says whether it is set; 0 counts as not set."""
    if isinstance(value, dict):
        known = value.get('set', True) and not value.get('infinite')
        value = value.get('number') if known else None
    return float(value) if value else None


def _document(answer: str) -> dict[str, Any]:
    answer = after_banner(answer, 'squeue --json', r'\{', None)
    try:
        document: dict[str, Any] = json.loads(answer)
    except (ValueError, RecursionError) as error:
        said = 'squeue --json did not answer with a JSON document'
        raise NotUnderstood(f'{said}: {error}') from error
    if document.get('errors') and not document.get('jobs'):  # Slurm's exit status may be 0
        raise NotUnderstood(f'squeue --json told no jobs, but errors: {document["errors"]}'[:300])
    return document
