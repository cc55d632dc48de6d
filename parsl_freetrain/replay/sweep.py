"""Many replays in parallel; each becomes a row of one table."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from parsl_freetrain.core.model.errors import BadInput, needs
from parsl_freetrain.replay.result import ReplayResult
from parsl_freetrain.replay.scenario import Scenario, replay
from parsl_freetrain.replay.study import OF_A_TRACE, Study, option
from parsl_freetrain.replay.trace import Trace
from parsl_freetrain.replay.trainers import ReplayTrainer

with needs('A sweep of replays'):
    import pandas as pd
    from joblib import Parallel, delayed
    from joblib.externals.loky import get_reusable_executor

FORMATS = ('.csv', '.parquet')
MOST_CASES = 10_000


def requests(options: Mapping[str, object], swept: Mapping[str, Sequence[object]]) -> list[Study]:
    """One request for every combination of the swept values; raises BadInput."""
    product = itertools.product(*swept.values())
    combinations = [dict(zip(swept, values, strict=True)) for values in product]
    if len(combinations) > MOST_CASES:
        raise BadInput(
            f'These sweeps ask for {len(combinations)} replays; {MOST_CASES} are the most at once.'
        )
    return [Study.of({**options, **combination}) for combination in combinations]


def scenarios(asked: Sequence[Study]) -> list[Scenario]:
    """The scenarios of the requests; files that several share are read once. Raises BadInput."""
    traces: dict[tuple[object, ...], Trace] = {}
    trainers: dict[Path | None, tuple[ReplayTrainer, ...]] = {}
    found = []
    for request in asked:
        if (key := tuple(getattr(request, name) for name in OF_A_TRACE)) not in traces:
            traces[key] = request.trace()
        if request.trainers not in trainers:
            trainers[request.trainers] = request.read_trainers()
        found.append(request.scenario(traces[key], trainers[request.trainers]))
    return found


def sweep(
    asked: Sequence[Study],
    swept: Sequence[str],
    *,
    jobs: int = 1,
    done: Callable[[], None] | None = None,
) -> pd.DataFrame:
    """A row for each replay: the ``swept`` fields, and the flattened answer; or BadInput."""
    ready = scenarios(asked)
    # The processes share arrays as memory-mapped files, without copies.
    parallel = Parallel(n_jobs=jobs, return_as='generator')
    rows = []
    try:
        answers = parallel(delayed(_answer)(s) for s in ready)
        for request, scenario, answer in zip(asked, ready, answers, strict=True):
            rows.append(values(request, scenario, swept) | answer)
            if done is not None:
                done()
    finally:
        if jobs != 1:
            # Idle processes would stay for minutes.
            get_reusable_executor().shutdown(wait=True, kill_workers=True)
    return pd.DataFrame(rows)


def values(request: Study, scenario: Scenario, swept: Sequence[str]) -> dict[str, object]:
    """The columns that identify a row; ``max_trainers`` "all" becomes the number of trainers."""
    found: dict[str, object] = {}
    for field in swept:
        value = getattr(request, field)
        if field == 'max_trainers' and value == 'all':
            value = len(scenario.trainers)
        found[column(field)] = str(value) if isinstance(value, Path) else value
    return found


def column(field: str) -> str:
    return option(field).removeprefix('--').replace('-', '_')


def row(result: ReplayResult) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in result.as_json().items():
        flat.update(
            {f'{key}_{inner}': found for inner, found in value.items()}
            if isinstance(value, dict)
            else {key: value}
        )
    return flat


def _answer(scenario: Scenario) -> dict[str, object]:
    return row(replay(scenario))


def check_out(path: Path) -> None:
    if path.suffix not in FORMATS:
        raise BadInput(f'--out is {path}; its name must end in .csv or .parquet.')
    if not path.parent.is_dir():
        raise BadInput(f'--out is {path}, but there is no folder {path.parent}.')


def write(table: pd.DataFrame, path: Path) -> None:
    if path.suffix == '.parquet':
        table.to_parquet(path, index=False)
    else:
        table.to_csv(path, index=False)
