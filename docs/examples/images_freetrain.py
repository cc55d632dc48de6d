"""In the manner of timm: mixed images, warm-up, clipping, averaged weights and early stopping."""

import parsl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from parsl_freetrain import BackfillProvider, FreeTrainExecutor, LocalSite, freetrain_app

source = load_digits()
images = torch.tensor(source.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(source.target)
held_in = TensorDataset(images[:480], labels[:480])
held_out = TensorDataset(images[480:640], labels[480:640])


def mixed_loss(model, x, y):
    share = torch.distributions.Beta(0.2, 0.2).sample()
    other = torch.randperm(len(x))
    said = model(share * x + (1 - share) * x[other])
    return share * F.cross_entropy(said, y) + (1 - share) * F.cross_entropy(said, y[other])


def measure(model, batch):
    x, y = batch
    return {'accuracy': (model(x).argmax(1) == y).float()}


@freetrain_app(min_nodes=1, max_nodes=2, total_epochs=8)
def train(ctx):
    torch.manual_seed(0)
    features = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*features, nn.Dropout(0.1), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    model, optimizer, warmup, _ = ctx.prepare(model, optimizer, warmup, average, clip_grad_norm=1.0)
    seen = ctx.state

    def worse_for_long():
        with torch.no_grad():
            accuracy = measure(average.eval(), held_out[:])['accuracy'].mean().item()
        better = accuracy > seen.get('best', 0.0)
        seen['waited'] = 0 if better else seen['waited'] + 1
        seen['best'] = max(accuracy, seen.get('best', 0.0))
        return seen['waited'] == 2

    ctx.each_epoch(lambda: worse_for_long() and ctx.finish_early('worse for two epochs'))
    for x, y in ctx.loop(DataLoader(held_in, batch_size=32, shuffle=True)):
        optimizer.zero_grad()
        mixed_loss(model, x, y).backward()
        optimizer.step()
        warmup.step()
        average.update_parameters(model)
    return seen['best']


if __name__ == '__main__':
    executor = FreeTrainExecutor(provider=BackfillProvider(site=LocalSite(nodes=2)))
    with parsl.load(parsl.Config(executors=[executor], strategy='none')):
        print(train().result().result)
