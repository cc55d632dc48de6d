"""An allocation problem as a JSON document: its fields, and a sentence for whatever is wrong.

Users state problems in this form to ``freetrain allocate``, and the ledger keeps those of a run's
decisions in it. :mod:`parsl_freetrain.core.allocation.formulation` turns documents into problems
and back.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from parsl_freetrain.core.allocation.formulation import MOST_NODES
from parsl_freetrain.core.model.errors import BadInput

Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=10**15)]
Least1 = Annotated[int, Field(ge=1, le=10**15)]
Pool = Annotated[int, Field(ge=0, le=MOST_NODES)]
Name = Annotated[str, Field(min_length=1, max_length=500)]


class StrictModel(BaseModel):
    """Refuses unknown fields, and numbers that are written as text."""

    model_config = ConfigDict(extra='forbid', strict=True, frozen=True)


class EfficiencyDocument(StrictModel):
    nodes: Annotated[list[Least1], Field(min_length=1)]
    value: list[Share]


class TrainerDocument(StrictModel):
    name: Name
    min_nodes: Count
    max_nodes: Least1
    current_nodes: Count | None = None
    current: dict[str, Count] | None = None
    rescale_up_s: Seconds
    rescale_down_s: Seconds
    nodes: Annotated[list[Count], Field(min_length=1)]
    rate: list[Amount] | None = None
    rates: Annotated[dict[Name, list[Amount]], Field(min_length=1)] | None = None
    priority: Amount = 1.0
    deadline_s: Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)] | None = None
    remaining_samples: Annotated[float, Field(gt=0, le=1e18, allow_inf_nan=False)] | None = None
    efficiency: EfficiencyDocument | None = None
    waited_s: Seconds = 0.0
    age_s: Seconds = 0.0
    lost_s: Seconds = 0.0
    sizes: Annotated[list[Least1], Field(min_length=1)] | None = None
    share: Count = 0
    user: Name | None = None
    group: Name | None = None
    since_rescale_s: Seconds | None = None
    shortest_s: Seconds = 0.0
    mixed_parts: Count = 0


class BlockDocument(StrictModel):
    id: Name
    nodes: Pool
    remaining_s: Seconds | None = None
    node_class: Name | None = None


class ProblemDocument(StrictModel):
    id: str | int | None = None
    horizon_s: Positive
    nodes: Pool | None = None
    blocks: list[BlockDocument] | None = None
    trainers: list[TrainerDocument]
    objective: str | None = None
    spans_blocks: bool = True
    max_nodes: Count | None = None
    keep_free: Count = 0
    user_nodes: dict[str, Count] = {}
    group_nodes: dict[str, Count] = {}
    user_shares: dict[str, Count] = {}
    group_shares: dict[str, Count] = {}
    budget_node_s: Amount | None = None
    user_budget_node_s: dict[str, Amount] = {}
    group_budget_node_s: dict[str, Amount] = {}
    min_rescale_interval_s: Seconds = 0.0


def decode(text: str) -> dict[str, Any]:
    """The fields of a JSON object, not yet checked. Raises BadInput if the text is not one JSON
    object.
    """
    try:
        raw = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_once_each)
    except BadInput:
        raise
    except json.JSONDecodeError as error:
        raise BadInput(f'it is not JSON: {error.msg} at column {error.colno}.') from None
    except ValueError:
        raise BadInput('it has a number with too many digits.') from None
    except RecursionError:
        raise BadInput('it is nested too deeply.') from None
    if not isinstance(raw, dict):
        raise BadInput(f'a problem is a JSON object, {_shown(raw)} is not.')
    return raw


def _refuse_constant(name: str) -> NoReturn:
    raise BadInput(f'{name} is not a number in JSON.')


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadInput(f'an object has the field {twice!r} twice.')
    return fields


def check(raw: dict[str, Any]) -> ProblemDocument:
    """The document with these fields. Raises BadInput if a field cannot be used; the sentence names
    the trainer and the field.
    """
    try:
        return ProblemDocument.model_validate(raw)
    except ValidationError as error:
        raise BadInput(_sentence(raw, error)) from None


def _sentence(raw: dict[str, Any], error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    loc = first['loc']
    if loc[0] == 'id':  # followed by the type that was tried
        loc = loc[:1]
    where, model = '', ProblemDocument.model_fields
    if len(loc) > 2 and loc[0] in ('trainers', 'blocks') and isinstance(loc[1], int):
        key = 'name' if loc[0] == 'trainers' else 'id'
        name = raw[str(loc[0])][loc[1]].get(key)
        where = (
            f'{str(loc[0])[:-1]} {name!r}: '
            if isinstance(name, str) and name
            else f'{str(loc[0])[:-1]} number {loc[1] + 1}: '
        )
        model = TrainerDocument.model_fields if loc[0] == 'trainers' else BlockDocument.model_fields
        loc = loc[2:]
    if len(loc) > 1 and loc[0] == 'efficiency':
        model = EfficiencyDocument.model_fields
    if first['type'] == 'missing':
        return f'{where}the field {_path(loc)} is missing.'
    if first['type'] == 'extra_forbidden':
        return f'{where}there is no field {_shown(loc[-1])}; the fields are {", ".join(model)}.'
    # Such as 'List should have at least 1 item after validation, not 0'.
    wanted = first['msg'].partition(' ')[2].partition(' after validation')[0]
    return f'{where}{_path(loc)} is {_shown(first["input"])}; it {wanted}.'


def _path(loc: tuple[int | str, ...]) -> str:
    path = str(loc[0])
    for part in loc[1:]:
        path += f'[{part}]' if isinstance(part, int) else f'.{part}'
    return path if path.isprintable() else ascii(path)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f'{text[:57]}...'
