"""Small models and data for ``transformers.Trainer``, and a way to run it on N ranks or in one plain process."""

import os
import warnings

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from smp_strategy.testing import run_ranks

SAMPLES, LENGTH, VOCABULARY = 32, 12, 40
# Adam divides by what is almost zero where two runs differ in the last bit; SGD keeps a difference as small as it is.
EXACT = {"max_grad_norm": 1e6, "lr_scheduler_type": "constant", "learning_rate": 1e-2}


class Texts(Dataset):
    """Sequences with labels for each token, of which each sequence ignores another number."""

    def __init__(self, samples=SAMPLES, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
        self.labels = self.tokens.clone()
        for number, row in enumerate(self.labels):
            row[: number % 5] = -100

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


class Sentences(Texts):
    """Sequences with one label each."""

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": int(tokens.sum()) % 3}


class Sequences(Texts):
    """Few sequences that are to be copied."""

    def __init__(self):
        super().__init__(samples=7)

    def __getitem__(self, index):
        tokens = self.tokens[index].clamp(min=2)
        return {"input_ids": tokens, "labels": tokens}


def language_model(dropout=0.0, *, tied=False):
    """A GPT-2; tied, the gradients at its two ends are added up in another order than by one process."""
    torch.manual_seed(1)
    config = GPT2Config(
        tie_word_embeddings=tied,
        **{"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 3, "n_head": 2},
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
    )
    return GPT2LMHeadModel(config)


def classifier(dropout=0.0):
    torch.manual_seed(1)
    config = BertConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2},
        **{"intermediate_size": 32, "num_labels": 3},
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout),
    )
    return BertForSequenceClassification(config)


def arguments(folder, smp=None, *, kind=TrainingArguments, **options):
    """Training arguments; with ``smp`` the model is spread as they say."""
    if smp is not None:
        from smp_strategy.integrations.accelerate.plugin import SMPPlugin

        options["parallelism_config"] = SMPPlugin(**smp)
    defaults = {
        **{"use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 3, "save_strategy": "no"},
        **{"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "num_train_epochs": 1},
        **{"logging_strategy": "steps", "logging_steps": 1, "dataloader_pin_memory": False},
    }
    return kind(output_dir=str(folder), **{**defaults, **options})


def text_trainer(folder, smp=None, model=None, kind=Trainer, **options):
    """A Trainer of a language model."""
    given = {name: options.pop(name) for name in list(options) if name in ("compute_loss_func", "callbacks")}
    return kind(
        model=model or language_model(),
        args=arguments(folder, smp, **options),
        train_dataset=Texts(),
        eval_dataset=Texts(11, seed=1),
        **given,
    )


def weights_of(trainer):
    """All weights under their plain names, on the first rank."""
    if not hasattr(trainer.accelerator, "smp"):
        return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    return trainer.accelerator.get_state_dict(trainer.model)


def logged(trainer, key="loss"):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def on_ranks(body, world_size, *args, timeout=150.0, **kwargs):
    """``body`` on ranks of a process group; with one rank it is plain, without a group."""
    return run_ranks(_quietly, world_size, body, args, kwargs, timeout=timeout)


def alone(body, *args, **kwargs):
    """``body`` in one process of its own, that knows of no other."""
    return on_ranks(_without_group, 1, body, args, kwargs)[0]


def _without_group(body, args, kwargs):
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    return body(*args, **kwargs)


def _quietly(body, args, kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return body(*args, **kwargs)
