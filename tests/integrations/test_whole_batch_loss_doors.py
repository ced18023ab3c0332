"""Every door trains on the loss of the whole batch where labels are ignored, as one process without microbatches."""

import pytest
import torch
import torch.nn.functional as F
from accelerate_checks import fresh_accelerator
from hf_checks import LENGTH, VOCABULARY, Texts, alone, arguments, logged, on_ranks, weights_of
from lightning_toy import toy_module, toy_trainer
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForMaskedLM, BertForTokenClassification, Trainer

import smp_strategy.smp as smp

STEPS, BATCH = 3, 8
PP2 = {"pipeline_parallel_degree": 2, "microbatches": 4}
SAME = {"rtol": 1e-5, "atol": 1e-6}


class Labelled(Dataset):
    """Tokens of which few have a label, and some samples none."""

    def __init__(self):
        texts = Texts(samples=STEPS * BATCH)
        self.tokens, self.labels = texts.tokens, texts.tokens % 5
        for number, row in enumerate(self.labels):
            row[: LENGTH - (0, 0, 7, 1, 3, 12, 0, 2)[number % 8]] = -100

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def bert(kind):
    torch.manual_seed(1)
    config = BertConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2},
        **{"intermediate_size": 32, "num_labels": 5, "tie_word_embeddings": False},
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    )
    return kind(config)


def plain(kind):
    """Losses and weights of one process."""
    model, losses = bert(kind), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(Labelled(), batch_size=BATCH):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in model.named_parameters()}


def assert_same(found, expected):
    losses, weights = expected
    assert found[0] == pytest.approx(losses, rel=1e-6)
    for name, value in weights.items():
        torch.testing.assert_close(found[1][name], value, **SAME)


def by_accelerate(kind, options):
    model, losses = bert(kind), []
    accelerator = fresh_accelerator(options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Labelled(), batch_size=BATCH))
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses, accelerator.get_state_dict(model)


@pytest.mark.parametrize("kind", [BertForTokenClassification, BertForMaskedLM])
def test_accelerate(kind):
    assert_same(on_ranks(by_accelerate, 2, kind, PP2)[0], plain(kind))


def by_trainer(folder, options):
    class InOrder(Trainer):
        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(Labelled())

    given = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    args = arguments(folder, options, per_device_train_batch_size=BATCH, **given)
    trainer = InOrder(model=bert(BertForTokenClassification), args=args, train_dataset=Labelled())
    trainer.train()
    return logged(trainer), weights_of(trainer)


def test_trainer(tmp_path):
    expected = alone(by_trainer, tmp_path, None)
    assert_same(on_ranks(by_trainer, 2, tmp_path, PP2)[0], expected)


# Lightning, and SageMaker's functions


def pairs():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(STEPS * BATCH, 8, generator=generator)
    labels = torch.randint(0, 4, (STEPS * BATCH,), generator=generator)
    labels[torch.arange(STEPS * BATCH) % 8 < 5] = -100
    return torch.utils.data.TensorDataset(inputs, labels)


def lightning_step(self, batch, batch_idx):
    inputs, labels = batch
    loss = F.cross_entropy(self.net(inputs), labels)
    num = (labels != -100).sum()
    second = (self.net(inputs).square().mean(-1) * (labels == 2)).sum() / (labels == 2).sum().clamp(min=1)
    self.log("loss", loss, batch_size=int(num))
    self.log("second", second)
    if self.automatic_optimization:
        return loss + second
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(loss + second)
    optimizer.step()
    return None


def by_lightning(folder, options, automatic):
    module = toy_module(
        training_step=lightning_step, configure_optimizers=lambda self: torch.optim.SGD(self.parameters(), lr=0.1)
    )
    module.automatic_optimization = automatic
    seen = []
    module.on_train_batch_end = lambda *args: seen.append(
        [float(module.trainer.callback_metrics[name]) for name in ("loss", "second")]
    )
    trainer = toy_trainer(folder, smp=options, max_epochs=1)
    trainer.fit(module, DataLoader(pairs(), batch_size=BATCH))
    return sum(seen, []), {name: value.detach().clone() for name, value in module.named_parameters()}


@pytest.mark.parametrize("automatic", [True, False])
def test_lightning(tmp_path, automatic):
    expected = alone(by_lightning, tmp_path, None, True)
    for found in on_ranks(by_lightning, 2, tmp_path, PP2, automatic):
        assert_same(found, expected)


def by_sagemaker(options):
    smp.init({"microbatches": 4, "partitions": 2} if options else {})
    model = smp.DistributedModel(toy_module().net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model, inputs, labels):
        loss = F.cross_entropy(model(inputs), labels)
        model.backward(loss)
        return loss

    losses = []
    for inputs, labels in DataLoader(pairs(), batch_size=BATCH):
        optimizer.zero_grad()
        losses.append(step(model, inputs, labels).reduce_mean().item())
        optimizer.step()
    return losses, model.state_dict()


def test_sagemaker():
    model, losses = toy_module().net, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in DataLoader(pairs(), batch_size=BATCH):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_same(on_ranks(by_sagemaker, 2, True)[0], (losses, dict(model.named_parameters())))
