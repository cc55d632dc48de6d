"""What the runs on a device train: a GPT of 124 million weights, a ResNet of 50 layers, and a
network of every kind of operation whose bits are compared; ``tiny`` ones on CPUs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Workload:
    """A network, its loss for a batch of sample numbers, and the size of the batch."""

    network: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor], Tensor]
    batch: int
    optimizer: Callable[[Any], torch.optim.Optimizer]


class Layer(nn.Module):
    """A transformer's layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """As GPT-2, with tied embeddings."""

    def __init__(self, words: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.words.weight)


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()

        def conv(a: int, b: int, size: int, stride: int = 1) -> nn.Sequential:
            layer = nn.Conv2d(a, b, size, stride, padding=size // 2, bias=False)
            return nn.Sequential(layer, nn.BatchNorm2d(b))

        self.first, self.second = conv(inside, width, 1), conv(width, width, 3, stride)
        self.third = conv(width, 4 * width, 1)
        changes = stride > 1 or inside != 4 * width
        self.short = conv(inside, 4 * width, 1, stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.third(F.relu(self.second(F.relu(self.first(x)))))
        return F.relu(y + self.short(x))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def resnet(width: int, depths: tuple[int, ...]) -> nn.Module:
    """As ResNet-50 with width 64 and depths (3, 4, 6, 3)."""
    # Mean pooling, as the backward pass of the largest one is not deterministic on GPUs.
    stem = nn.Conv2d(3, width, 7, 2, 3, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(width), nn.ReLU(), nn.AvgPool2d(2)]
    inside = width
    for i, depth in enumerate(depths):
        for j in range(depth):
            layers.append(Bottleneck(inside, width << i, 2 if i and not j else 1))
            inside = 4 * width << i
    return nn.Sequential(*layers, Mean(), nn.Dropout(0.1), nn.Linear(inside, 1000))


def gpt_of(words: int, length: int, width: int, layers: int, heads: int, batch: int) -> Workload:
    def loss(model: nn.Module, numbers: Tensor) -> Tensor:
        tokens = _pool(64, (length + 1,), numbers.device, words)[numbers % 64]
        logits = model(tokens[:, :-1]).flatten(0, 1)
        return F.cross_entropy(logits.float(), tokens[:, 1:].flatten())

    return Workload(lambda: Gpt(words, length, width, layers, heads), loss, batch, _adamw)


def resnet_of(width: int, depths: tuple[int, ...], size: int, batch: int) -> Workload:
    def network() -> nn.Module:
        return resnet(width, depths).to(memory_format=torch.channels_last)  # type: ignore[no-any-return, call-overload]

    def loss(model: nn.Module, numbers: Tensor) -> Tensor:
        images = _pool(64, (3, size, size), numbers.device)[numbers % 64]
        out = model(images.contiguous(memory_format=torch.channels_last))
        return F.cross_entropy(out.float(), numbers % 1000)

    return Workload(network, loss, batch, _sgd)


class Mixed(nn.Module):
    """Attention, an embedding, a convolution: not deterministic by themselves; norm, dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(100, width), Layer(width, 4)
        self.mix, self.norm = nn.Conv1d(width, width, 3, padding=1), nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layer(self.words(tokens)).transpose(1, 2)
        return x + self.drop(self.norm(self.mix(x)))  # type: ignore[no-any-return]


def layers_of(width: int, count: int) -> Workload:
    """So many small layers that the Python thread is what takes time."""

    def network() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))

    def loss(model: nn.Module, numbers: Tensor) -> Tensor:
        return model(_pool(64, (width,), numbers.device)[numbers % 64]).pow(2).mean()  # type: ignore[no-any-return]

    return Workload(network, loss, 32, _sgd)


def _mixed_of(width: int) -> Workload:
    def loss(model: nn.Module, numbers: Tensor) -> Tensor:
        tokens = _pool(64, (32,), numbers.device, 100)[numbers % 64]
        out: Tensor = (model(tokens).float() - 1).pow(2).mean()
        return out

    return Workload(lambda: Mixed(width), loss, 16, _adamw)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    given = list(parameters)
    return torch.optim.AdamW(given, lr=3e-4, fused=given[0].device.type != 'cpu')


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


_POOLS: dict[Any, Tensor] = {}


def _pool(count: int, shape: tuple[int, ...], device: torch.device, words: int = 0) -> Tensor:
    """Samples that stay on the device: numbers below ``words``, or else floating-point ones."""
    key = (count, shape, device, words)
    if key not in _POOLS:
        drawn = torch.Generator().manual_seed(1)
        size, how = (count, *shape), dict[str, Any](generator=drawn)
        made = torch.randint(words, size, **how) if words else torch.randn(size, **how)
        _POOLS[key] = made.to(device)
    return _POOLS[key]


WORKLOADS = {
    'gpt': gpt_of(50304, 1024, 768, 12, 12, batch=16),
    'resnet': resnet_of(64, (3, 4, 6, 3), 224, batch=64),
    'small gpt': gpt_of(8192, 256, 512, 4, 8, batch=16),
    'mixed': _mixed_of(256),
    'layers': layers_of(32, 150),
    'tiny gpt': gpt_of(100, 8, 16, 12, 4, batch=16),
    'tiny resnet': resnet_of(2, (3, 4, 6, 3), 64, batch=16),
    'tiny small gpt': gpt_of(100, 8, 16, 2, 4, batch=16),
    'tiny mixed': _mixed_of(16),
    'tiny layers': layers_of(32, 150),
}
