"""The texts of a run in all views, of the terminal and the browser."""

from html import escape

from parsl_freetrain.core.model.errors import clean, nodes_text
from parsl_freetrain.journal.kept_metrics import main_metric
from parsl_freetrain.report.status import BlockNow, RunStatus, TrainerNow

LEAST_GAP = 1e-4  # a decision off the best one by at most this share counts as the best

UNKNOWN = '–'


def trainer_cells(t: TrainerNow) -> dict[str, str]:
    """By column, beside its name, state and progress."""
    is_loss = main_metric(t.metrics) == 'loss'
    return {
        'nodes': str(t.nodes),
        'samples': samples_text(t),
        'loss': value_text(t.loss, '.4g') if is_loss else metric_text(t),
        'rate': rate_text(t.rate),
        'U': value_text(t.efficiency, '.2f'),
        'frag': str(t.fragments),
        'pre': str(t.preempted),
        'resc': str(t.rescaled),
        'done in': finish_text(t),
    }


def trainer_html(t: TrainerNow) -> str:
    """What is known of a trainer as a table for a notebook, in the notebook's own colours."""
    cells = {'trainer': t.name, 'state': t.state, **trainer_cells(t)}
    known = {title: text for title, text in cells.items() if text != UNKNOWN}
    head, row = (
        ''.join(f'<{tag}>{escape(text)}</{tag}>' for text in texts)
        for tag, texts in (('th', known), ('td', known.values()))
    )
    return f'<table><tr>{head}</tr><tr>{row}</tr></table>'


def block_cells(block: BlockNow) -> dict[str, str]:
    return {
        'block': block.name,
        'nodes': str(block.nodes),
        'time left': left_text(block),
        'trainers': ', '.join(block.trainers) or 'idle',
    }


def heading_words(seen: RunStatus) -> str:
    words = [duration_text(seen.elapsed_s), nodes_text(sum(b.nodes for b in seen.blocks))]
    if seen.ended is not None:
        words.append(f'ended: {clean(seen.ended)}')
    elif seen.life.state == 'died':
        words.append('died')
    elif seen.life.state == 'silent':
        words.append(f'silent for {duration_text(seen.silent_s)}')
    if seen.decision is not None and (gap := seen.decision.gap or 0.0) > LEAST_GAP:
        words.append(f'decision -{100 * gap:.2g} %')
    return '  '.join(words)


def in_shape(t: TrainerNow) -> str:
    said = [t.shape] if t.shape else []
    if t.rounds is not None:
        rounds, pieces, replicas = t.rounds
        going = f'round {rounds + 1}, {pieces} of {replicas} pieces done'
        ended = f'all {rounds} rounds, {rounds * replicas} pieces'
        said.append(ended if t.state == 'finished' else going)
        if t.weights_by is not None:
            said.append(f'last outer step by replica {t.weights_by}')
    return f' ({"; ".join(said)})' if said else ''


def metric_text(t: TrainerNow) -> str:
    name = main_metric(t.metrics)
    return f'{name} {value_text(t.loss, ".4g")}' if name else UNKNOWN


def samples_text(t: TrainerNow) -> str:
    return f'{count_text(t.samples)}/{count_text(t.total)}' if t.total else count_text(t.samples)


def count_text(n: int) -> str:
    for size, unit in ((10**9, 'G'), (10**6, 'M'), (10**3, 'k')):
        if n >= 10 * size:
            return f'{n / size:.1f}'.removesuffix('.0') + unit
    return str(n)


def rate_text(rate: float | None) -> str:
    return UNKNOWN if rate is None else f'{count_text(round(rate))}/s'


def value_text(value: float | None, how: str) -> str:
    return UNKNOWN if value is None else format(value, how)


def finish_text(t: TrainerNow) -> str:
    return UNKNOWN if t.finish_s is None else duration_text(t.finish_s)


def left_text(block: BlockNow) -> str:
    if block.joined == 0:
        return 'starting'
    return 'unknown' if block.left_s is None else duration_text(max(0.0, block.left_s))


def duration_text(seconds: float) -> str:
    hours, rest = divmod(max(0, round(seconds)), 3600)
    return f'{hours}:{rest // 60:02d}:{rest % 60:02d}' if hours else f'{rest // 60}:{rest % 60:02d}'
