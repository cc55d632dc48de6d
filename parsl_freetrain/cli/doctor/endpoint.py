"""The part of ``freetrain doctor`` about a Globus Compute endpoint."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parsl_freetrain.cli.doctor.findings import Finding
from parsl_freetrain.core.model.errors import BadInput

ANSWER_S = 120.0  # a user's endpoint process may have to be started


def ask_endpoint(endpoint_id: str, options: Path | None, executor: Any = None) -> dict[str, Any]:
    """The versions here and at the endpoint, or the error if the endpoint does not answer.

    Parameters
    ----------
    options
        A JSON file with the options of the endpoint's template.
    executor
        Sends tasks to the endpoint; default: the Globus Compute SDK's executor.

    Raises
    ------
    BadInput
        If the file cannot be read.
    """
    from parsl_freetrain.remote import FreeTrainClient

    try:
        config = None if options is None else dict(json.loads(options.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(
            f'The file {options} cannot be used ({error}); it must be a JSON object of '
            'user_endpoint_config.'
        ) from error
    try:
        # The SDK prompts for a login on standard output, which is reserved for the result.
        with (
            contextlib.redirect_stdout(sys.stderr),
            FreeTrainClient(
                None if executor else endpoint_id, user_endpoint_config=config, executor=executor
            ) as client,
        ):
            return {
                'id': endpoint_id,
                'versions': [asdict(one) for one in client.compare_versions(ANSWER_S)],
            }
    except Exception as error:  # any error is the result
        return {'id': endpoint_id, 'error': f'{error}' or type(error).__name__}


def of_endpoint(facts: Mapping[str, Any]) -> Finding:
    """The finding about these versions."""
    if 'error' in facts:
        return Finding('endpoint', 'bad', facts['error'])
    wrong = [one for one in facts['versions'] if not one['fits']]
    shown = wrong or facts['versions']
    says = [
        f'{one["name"]} {one["there"]}'
        + (f' there, {one["here"]} here' if one['here'] != one['there'] else '')
        for one in shown
    ]
    return Finding('endpoint', 'bad' if wrong else 'ok', ', '.join(says))
