"""What ``freetrain doctor`` asks other processes: a probe here or on a node, and an endpoint."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parsl_freetrain.cli.doctor.measuring import NODE_S, once_each, private_folder
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.process.probe import appears, race

ANSWER_S = 120.0  # a user's endpoint process may have to be started


def ask_here() -> dict[str, Any]:
    """The probe's answer on this computer, from a child process."""
    return _probe([], {})


def ask_there(command: Sequence[str], folder: Path, addresses: Sequence[str]) -> dict[str, Any]:
    """The probe's answer on another computer, which ``command`` reaches; only ``error`` without
    one.

    Adds ``clock_skew_s`` (the certain part of the seconds by which its clock is ahead) and ``race``
    (see :func:`once_each`; None: the two did not see each other's files).
    """
    with private_folder(folder) as shared, socket.create_server(('', 0), backlog=8) as server:
        port = server.getsockname()[1]
        question = {'folder': str(shared), 'addresses': list(addresses), 'port': port}
        raced: dict[str, Any] = {}
        other = threading.Thread(target=_meet, args=(shared, raced), name='doctor-race')
        other.start()
        begun = time.time()
        answer = _probe(command, question)
        ended = time.time()
        (shared / 'ready').touch()  # in case it never came
        other.join()
    if 'error' in answer:
        return answer
    both = 'race' in answer and 'race' in raced
    answer['race'] = once_each([answer['race'], raced['race']]) if both else None
    # It read its clock at some time between these two, so only a larger difference is certain.
    ahead_s, behind_s = max(0.0, answer['clock'] - ended), min(0.0, answer['clock'] - begun)
    answer['clock_skew_s'] = round(ahead_s + behind_s, 3)
    return answer


def _meet(shared: Path, raced: dict[str, Any]) -> None:
    if appears(shared / 'ready', NODE_S) is not None:
        with contextlib.suppress(OSError):
            (shared / 'go').touch()
            raced['race'] = race(shared)


def _probe(command: Sequence[str], question: dict[str, Any]) -> dict[str, Any]:
    whole = [*command, sys.executable, '-P', '-m', 'parsl_freetrain.training.process.probe']
    asked = json.dumps(question)
    try:
        done = subprocess.run(
            whole, input=asked, capture_output=True, text=True, timeout=NODE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {'error': f'{type(error).__name__}: {error}'}
    for line in reversed(done.stdout.splitlines()):
        with contextlib.suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer
    return {
        'error': f'{" ".join(whole)!r} ended with status {done.returncode} and no answer: '
        f'{done.stderr.strip()[-500:]}'
    }


def ask_endpoint(endpoint_id: str, options: Path | None, executor: Any = None) -> dict[str, Any]:
    """The versions here and at a Globus Compute endpoint, or the error if it does not answer.
    ``options``: a JSON file with the options of the endpoint's template; BadInput if it cannot be
    read. ``executor``: sends tasks to the endpoint; default: the Globus Compute SDK's.
    """
    from parsl_freetrain.remote.client import FreeTrainClient

    try:
        config = None if options is None else dict(json.loads(options.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(
            f'The file {options} cannot be used ({error}); it must be user_endpoint_config as JSON.'
        ) from error
    where = None if executor else endpoint_id
    try:
        # The SDK prompts for a login on standard output, which is reserved for the result.
        with (
            contextlib.redirect_stdout(sys.stderr),
            FreeTrainClient(where, user_endpoint_config=config, executor=executor) as client,
        ):
            versions = [asdict(one) for one in client.compare_versions(ANSWER_S)]
            return {'id': endpoint_id, 'versions': versions}
    except Exception as error:  # any error is the result
        return {'id': endpoint_id, 'error': f'{error}' or type(error).__name__}
