"""Fine-tuning with Hugging Face's Trainer, as its own example scripts do it: nothing here knows of pipelines.

    python examples/hf_trainer.py                                                               # one process
    accelerate launch --config_file configs/accelerate/cpu_2.yaml examples/hf_trainer.py        # two stages

A small BERT learns to tell Python code from prose in pieces of the standard library. It starts from random weights, or
from the pretrained weights in a folder (``--pretrained FOLDER``), whose tokens must be bytes. It is evaluated and saved
after each epoch; started again, the script goes on where it has stopped, with another number of processes, too. All
arguments of ``TrainingArguments`` can be given: ``--num_train_epochs 4 --learning_rate 1e-3``.
"""

import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

__all__ = ["CodeOrProse", "accuracy", "main"]


@dataclass
class Sizes:
    """How large the model and its data are."""

    layers: int = field(default=4, metadata={"help": "Layers of the model."})
    hidden_size: int = field(default=64, metadata={"help": "Width of the model."})
    length: int = field(default=64, metadata={"help": "Bytes in a piece of text."})
    train_samples: int = field(default=1024, metadata={"help": "Pieces to train on."})
    eval_samples: int = field(default=256, metadata={"help": "Pieces to evaluate on."})
    pretrained: str | None = field(default=None, metadata={"help": "Folder of a pretrained model to start from."})

    def model(self) -> PreTrainedModel:
        """A classifier of this size, or the pretrained one."""
        if self.pretrained is not None:
            return AutoModelForSequenceClassification.from_pretrained(self.pretrained, num_labels=2)
        config = BertConfig(
            vocab_size=256,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            intermediate_size=4 * self.hidden_size,
            max_position_embeddings=self.length,
        )
        return BertForSequenceClassification(config)


class CodeOrProse(Dataset[dict[str, Tensor]]):
    """Pieces of the standard library's source, and of the language reference, in turns.

    Args:
        samples: how many.
        length: bytes in each.
        seed: where they lie.
    """

    def __init__(self, samples: int, length: int, seed: int) -> None:
        self.length = length
        self.texts = [bytearray(text) for text in (_code(), _prose())]
        generator = torch.Generator().manual_seed(seed)
        self.starts = [
            int(torch.randint(len(self.texts[number % 2]) - length, (), generator=generator))
            for number in range(samples)
        ]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start, label = self.starts[index], index % 2
        piece = self.texts[label][start : start + self.length]
        return {"input_ids": torch.frombuffer(piece, dtype=torch.uint8).long(), "labels": torch.tensor(label)}


def _code() -> bytes:
    return b"\n".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))


def _prose() -> bytes:
    from pydoc_data.topics import topics

    return "\n\n".join(text for _, text in sorted(topics.items())).encode()


def accuracy(predicted: EvalPrediction) -> dict[str, float]:
    """The part of the pieces that is told apart."""
    chosen = np.argmax(predicted.predictions, axis=-1)
    return {"accuracy": float(np.mean(chosen == predicted.label_ids))}


def main() -> None:
    """Train, evaluate, save."""
    parser = HfArgumentParser((Sizes, TrainingArguments))  # type: ignore[arg-type]
    parser.set_defaults(
        output_dir="outputs/hf_trainer",
        per_device_train_batch_size=32,
        per_device_eval_batch_size=32,
        num_train_epochs=2,
        learning_rate=1e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to="none",
    )
    sizes, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    trainer = Trainer(
        model=sizes.model(),
        args=args,
        train_dataset=CodeOrProse(sizes.train_samples, sizes.length, seed=1),
        eval_dataset=CodeOrProse(sizes.eval_samples, sizes.length, seed=2),
        compute_metrics=accuracy,
    )
    last = None
    if Path(args.output_dir).is_dir():
        last = get_last_checkpoint(args.output_dir)  # type: ignore[no-untyped-call]
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint or last)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
