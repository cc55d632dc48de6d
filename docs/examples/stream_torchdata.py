"""A stream read by torchdata's StatefulDataLoader, which decodes lines of text in two workers."""

import sys
from pathlib import Path

import parsl
import torch
import torch.nn.functional as F
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from parsl_freetrain import FreeTrainExecutor, freetrain_app


class Lines(IterableDataset):
    """The lines of files; each worker reads its share of the files."""

    def __init__(self, files):
        self.files = files

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for file in self.files[first::step]:
            for line in Path(file).read_text().splitlines():
                number, *x = map(float, line.split())
                yield int(number), torch.tensor(x) + 0.1 * torch.randn(2)


@freetrain_app(min_nodes=1, max_nodes=2, total_samples=120)
def train(ctx, files):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    samples = StatefulDataLoader(Lines(files), batch_size=None, num_workers=2)
    for number, x in ctx.loop(samples, batch_size=8):
        optimizer.zero_grad()
        F.mse_loss(model(x)[:, 0], number / 48).backward()
        optimizer.step()


def generate(folder):
    """Four files of twelve lines."""
    for file in range(4):
        lines = (f'{n} {n / 48} {1 - n / 48}\n' for n in range(12 * file, 12 * file + 12))
        (folder / f'{file}.txt').write_text(''.join(lines))
    return sorted(map(str, folder.glob('*.txt')))


if __name__ == '__main__':
    with parsl.load(parsl.Config(executors=[FreeTrainExecutor(site='laptop')])):
        print(train(generate(Path(sys.argv[1]))).result())
