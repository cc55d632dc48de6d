"""What ``freetrain doctor`` learns from a Globus Compute endpoint."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parsl_freetrain.cli.findings import Finding
from parsl_freetrain.core.errors import BadInput

PATIENCE_S = 120.0      # a user's endpoint process may have to be started


def ask_endpoint(endpoint_id: str, options: Path | None, executor: Any = None) -> dict[str, Any]:
    """Versions here and at the endpoint, or why they could not be had.

    Parameters
    ----------
    options
        A JSON file with the options that the endpoint's template asks for.
    executor
        The way to the endpoint; default: the Globus Compute SDK's.

    Raises
    ------
    BadInput
        If the file cannot be read.
    """
    from parsl_freetrain.remote import FreeTrainClient

    try:
        config = None if options is None else dict(json.loads(options.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f'The file {options} cannot be used ({error}); it must be a JSON object of user_endpoint_config.') from error
    try:
        # The SDK asks for a login on standard output, which is for the answer alone.
        with (contextlib.redirect_stdout(sys.stderr),
              FreeTrainClient(None if executor else endpoint_id, user_endpoint_config=config, executor=executor) as client):
            return {'id': endpoint_id, 'versions': [asdict(one) for one in client.compare_versions(PATIENCE_S)]}
    except Exception as error:      # whatever is wrong with it is what the doctor was asked for
        return {'id': endpoint_id, 'error': f'{error}' or type(error).__name__}


def of_endpoint(facts: Mapping[str, Any]) -> Finding:
    """What that means; pure."""
    if 'error' in facts:
        return Finding('endpoint', 'bad', facts['error'])
    wrong = [one for one in facts['versions'] if not one['fits']]
    shown = wrong or facts['versions']
    says = [f'{one["name"]} {one["there"]}' + (f' there, {one["here"]} here' if one['here'] != one['there'] else '') for one in shown]
    return Finding('endpoint', 'bad' if wrong else 'ok', ', '.join(says))
