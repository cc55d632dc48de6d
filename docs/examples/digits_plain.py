"""A small network learns scikit-learn's handwritten digits."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


def digits():
    source = load_digits()
    return torch.tensor(source.images, dtype=torch.float32) / 16, torch.tensor(source.target)


def train(images, labels, lr=0.05):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    dataset = torch.utils.data.TensorDataset(images, labels)
    for epoch in range(20):
        for x, y in torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    print('loss of the last batch:', loss.item())


if __name__ == '__main__':
    train(*digits())
