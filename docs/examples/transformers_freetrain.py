"""Hugging Face's Trainer: a small BERT learns which of two sorts of words a text has more of."""

import parsl
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    TrainingArguments,
)

from parsl_freetrain import FreeTrainExecutor, freetrain_app
from parsl_freetrain.integrations.transformers import Trainer

words = torch.randint(5, 64, (240, 12), generator=torch.Generator().manual_seed(0))
labels = ((words < 20).sum(1) > (words > 45).sum(1)).long()
rows = [{'input_ids': words[i], 'labels': labels[i]} for i in range(240)]


def compute_metrics(found):
    return {'accuracy': (found.predictions.argmax(-1) == found.label_ids).mean()}


@freetrain_app(min_nodes=1, max_nodes=2, total_epochs=4)
def train(ctx):
    torch.manual_seed(0)
    size = {'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 4}
    model = BertForSequenceClassification(BertConfig(vocab_size=64, intermediate_size=64, **size))
    args = TrainingArguments(
        'bert',
        num_train_epochs=4,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        warmup_steps=10,
        eval_strategy='epoch',
        metric_for_best_model='loss',
    )
    trainer = Trainer(
        ctx,
        model=model,
        args=args,
        train_dataset=rows[:192],
        eval_dataset=rows[192:],
        compute_metrics=compute_metrics,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    return trainer.evaluate()


if __name__ == '__main__':
    with parsl.load(parsl.Config(executors=[FreeTrainExecutor(site='laptop')])):
        print(train().result().result)
