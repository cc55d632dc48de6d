"""A stream of tar files in the form of WebDataset, shuffled in a buffer."""

import io
import sys
import tarfile
from pathlib import Path

import parsl
import torch
import torch.nn.functional as F
import webdataset

from parsl_freetrain import FreeTrainExecutor, freetrain_app


@freetrain_app(min_nodes=1, max_nodes=2, total_samples=120)
def train(ctx, files):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    shards = webdataset.WebDataset(files, shardshuffle=False, nodesplitter=lambda urls: urls)
    samples = shards.compose(webdataset.detshuffle(10, seed=1)).decode().to_tuple('cls', 'pth')
    for number, x in ctx.loop(samples, batch_size=8):
        optimizer.zero_grad()
        F.mse_loss(model(x)[:, 0], number / 48).backward()
        optimizer.step()


def generate(folder):
    """Four tar files of twelve samples."""
    for file in range(4):
        with tarfile.open(folder / f'{file}.tar', 'w') as tar:
            for n in range(12 * file, 12 * file + 12):
                content = io.BytesIO()
                torch.save(torch.tensor([n / 48, 1 - n / 48]), content)
                for name, data in (('cls', str(n).encode()), ('pth', content.getvalue())):
                    entry = tarfile.TarInfo(f'{n:06}.{name}')
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
    return sorted(map(str, folder.glob('*.tar')))


if __name__ == '__main__':
    with parsl.load(parsl.Config(executors=[FreeTrainExecutor(site='laptop')])):
        print(train(generate(Path(sys.argv[1]))).result())
