"""In the manner of timm: mixed images, warm-up, clipping, averaged weights, validation of these
after each epoch, and an end when they are good.
"""

import parsl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from parsl_freetrain import FreeTrainExecutor, freetrain_app

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


@torch.no_grad()
def accuracy_of(model):
    return sum((model(x).argmax(1) == y).sum().item() for x, y in DataLoader(held_out, 32)) / 160


@freetrain_app(min_nodes=1, max_nodes=2, total_epochs=8)
def train(ctx):
    torch.manual_seed(0)
    features = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*features, nn.Dropout(0.1), nn.Linear(512, 10))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05)
    warmup = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=20)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    loader = DataLoader(held_in, batch_size=32, shuffle=True)
    model, opt, warmup, _, loader = ctx.prepare(model, opt, warmup, ema, loader, clip_grad_norm=1.0)
    for epoch in ctx.epochs():
        for x, y in loader:
            opt.zero_grad()
            mixed_loss(model, x, y).backward()
            opt.step()
            warmup.step()
            ema.update_parameters(model)
        accuracy = accuracy_of(ema.eval())
        print(f'epoch {epoch}: accuracy {accuracy:.3f}')
        if accuracy > 0.85:
            break
    return accuracy


if __name__ == '__main__':
    with parsl.load(parsl.Config(executors=[FreeTrainExecutor(site='laptop')])):
        print(train().result().result)
