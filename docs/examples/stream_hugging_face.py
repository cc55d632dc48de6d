"""A stream of Hugging Face's datasets: files of JSON lines, shuffled in a buffer and mapped."""

import json
import sys
from pathlib import Path

import parsl
import torch
import torch.nn.functional as F
from datasets import load_dataset

from parsl_freetrain import FreeTrainExecutor, freetrain_app


@freetrain_app(min_nodes=1, max_nodes=2, total_samples=120)
def train(ctx, files):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = load_dataset('json', data_files=files, split='train', streaming=True)
    rows = rows.shuffle(seed=1, buffer_size=10).map(lambda row: {'x': [row['a'], 1 - row['a']]})
    for batch in ctx.loop(rows.with_format('torch'), batch_size=8):
        optimizer.zero_grad()
        F.mse_loss(model(batch['x'])[:, 0], batch['number'] / 48).backward()
        optimizer.step()


def generate(folder):
    """Four files of twelve rows."""
    for file in range(4):
        rows = ({'number': n, 'a': n / 48} for n in range(12 * file, 12 * file + 12))
        (folder / f'{file}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return sorted(map(str, folder.glob('*.jsonl')))


if __name__ == '__main__':
    with parsl.load(parsl.Config(executors=[FreeTrainExecutor(site='laptop')])):
        print(train(generate(Path(sys.argv[1]))).result())
