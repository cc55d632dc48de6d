"""Modules that fit a line, and such as are refused."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning: Any = pytest.importorskip('lightning.pytorch', reason='needs the extra lightning')

X = torch.randn(29, 4, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


class Line(lightning.LightningModule):  # type: ignore[misc]
    """Fits a line; it writes down what is called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        self.calls: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self.layer(batch[0]), batch[1])
        self.log('train_loss', loss, prog_bar=True)
        assert self.lr_schedulers().optimizer.param_groups is self.optimizers().param_groups
        self.calls.append(batch_idx)
        return {'loss': loss}

    def validation_step(self, batch: Any) -> None:
        self.log_dict({'val_loss': F.mse_loss(self.layer(batch[0]), batch[1])})

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append('step')

    def on_validation_epoch_end(self) -> None:
        self.calls.append('validated')

    def on_train_epoch_end(self) -> None:
        self.calls.append((self.current_epoch, self.global_step))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        total = self.trainer.estimated_stepping_batches
        return {
            'optimizer': optimizer,
            'lr_scheduler': {
                'scheduler': torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total),
                'interval': 'step',
            },
        }

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=8)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*DATA[:13]), batch_size=4)


class Plateau(Line):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.4)
        reduce = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
        return {'optimizer': optimizer, 'lr_scheduler': reduce, 'monitor': 'val_loss'}


class Sums(Line):
    def validation_step(self, batch: Any) -> None:
        self.log('n', 1.0, reduce_fx='sum')


class OfMetrics(Line):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        from torchmetrics import MeanMetric

        self.log('a', MeanMetric(), on_epoch=True)


class Appends(Line):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch[0]).mean()
        self.losses.append({'loss': loss.detach()})
        return loss

    def on_train_epoch_end(self) -> None:
        assert [one['loss'] for one in self.losses]


class NoLoss(Line):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class OwnStep(Line):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        pass


class ByHand(Line):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class AfterBatch(Line):
    def on_train_batch_end(self, *_: Any) -> None:
        pass


class WithMetrics(Line):
    """Objects of torchmetrics, a ``log`` and a step of its own, as in SchNetPack and NequIP."""

    def __init__(self) -> None:
        from torchmetrics import MeanSquaredError, SpearmanCorrCoef

        super().__init__()
        self.error, self.ranks = MeanSquaredError(squared=False), SpearmanCorrCoef()
        self.of_training, self.collected = MeanSquaredError(), list[Any]()

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        super().log(f'own_{name}', *args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.of_training(self.layer(batch[0]), batch[1])
        self.log('train_error', self.of_training)
        self.log('level', batch[1].mean(), on_epoch=True)
        return loss

    def validation_step(self, batch: Any) -> None:
        x, y = self.layer(batch[0])[:, 0], batch[1][:, 0]
        self.error(x, y)
        self.ranks.update(x, y)
        self.log('error', self.error)
        self.collected.append({'x': x, 'more': [y.numpy()]})

    def on_validation_epoch_end(self) -> None:
        worst = [one['x'].numpy() - one['more'][0] for one in self.collected]
        self.log('collected', np.concatenate(worst)[::3].max())
        self.collected.clear()
        self.log('ranks', self.ranks.compute())
        self.ranks.reset()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        for group in optimizer.param_groups:
            group['lr'] = 0.1 * min(1.0, (self.global_step + 1) / 5)
        super().optimizer_step(epoch, batch_idx, optimizer, closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class TwoOptimizers(Line):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.layer.parameters(), lr=0.1) for _ in range(2)]


class AsksForMore(Line):
    def on_train_start(self) -> None:
        print(self.trainer.fit_loop)
