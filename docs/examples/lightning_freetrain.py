"""Lightning: the transformer of its own demos, with validation, a schedule and early stopping."""

import parsl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.demos import LightningTransformer
from torch.utils.data import DataLoader, TensorDataset

from parsl_freetrain import FreeTrainExecutor, freetrain_app
from parsl_freetrain.integrations.lightning import Trainer

starts = torch.randint(24, (96, 1), generator=torch.Generator().manual_seed(0))
words = (starts + torch.arange(9) * (1 + starts % 3)) % 24


class Words(LightningTransformer):
    def __init__(self):
        super().__init__(vocab_size=24)

    def prepare_data(self):
        pass  # the words are there

    def validation_step(self, batch, batch_idx):
        self.log('val_loss', self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)]


def loader(rows, shuffle=False):
    return DataLoader(TensorDataset(rows[:, :-1], rows[:, 1:]), batch_size=16, shuffle=shuffle)


@freetrain_app(min_nodes=1, max_nodes=2, total_epochs=4)
def train(ctx):
    torch.manual_seed(0)
    trainer = Trainer(
        ctx,
        max_epochs=4,
        gradient_clip_val=0.5,
        callbacks=[EarlyStopping('val_loss', patience=2)],
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Words(), loader(words[:64], shuffle=True), loader(words[64:]))
    return trainer.callback_metrics['val_loss'].item()


if __name__ == '__main__':
    with parsl.load(parsl.Config(executors=[FreeTrainExecutor(site='laptop')])):
        print(train().result().result)
