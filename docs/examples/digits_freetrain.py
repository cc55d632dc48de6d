"""A small network learns scikit-learn's handwritten digits."""

import parsl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from parsl_freetrain import FreeTrainExecutor, freetrain_app


def digits():
    source = load_digits()
    return torch.tensor(source.images, dtype=torch.float32) / 16, torch.tensor(source.target)


@freetrain_app(min_nodes=1, max_nodes=2, total_epochs=20)
def train(ctx, images, labels, lr=0.05):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    dataset = torch.utils.data.TensorDataset(images, labels)
    model, optimizer = ctx.prepare(model, optimizer)
    for x, y in ctx.loop(dataset, batch_size=32):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss.item())


if __name__ == '__main__':
    with parsl.load(parsl.Config(executors=[FreeTrainExecutor(site='laptop')])):
        print(train(*digits()).result())
