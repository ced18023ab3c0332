"""Train Hugging Face's GPT-2 on real text with Accelerate.

    python examples/accelerate_train.py                  one process, plain Accelerate: the reference
    accelerate launch --config_file configs/accelerate/cpu_4.yaml examples/accelerate_train.py
    ... examples/accelerate_train.py --steps 20          a look at it
    ... examples/accelerate_train.py --resume outputs/accelerate/step_80

An ordinary script: it prepares, accumulates, clips, evaluates, saves and resumes as Accelerate's own examples do, and
has no parallel code in it. How the model is spread over the processes stands in the file that ``accelerate launch``
reads. Batches are split over the processes that read samples of their own, so the losses are the same under all
layouts. A line of progress says how fast it is and how long it will take: on two cores about five minutes.
"""

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

from corpus import Windows, bounded, read_folder, split, standard_library
from sampling import sample
from tracking import CSVTracker

__all__ = ["METRICS", "Options", "train"]

METRICS = ("train_loss", "val_loss", "lr")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What can be said on the command line; the model is that of ``model=gpt2_hf`` in ``examples/train.py``."""

    output: str = "outputs/accelerate"
    """Folder for metrics, checkpoints and the trained model."""
    resume: str | None = None
    """A checkpoint to go on from, whichever layout has written it."""
    path: str | None = None
    """Text: a file, or a folder whose files are read; the standard library of this Python if it is not given."""
    steps: int = 160
    """Optimizer steps."""
    batch_size: int = 16
    """Samples per micro-step, of all processes together."""
    accumulate: int = 1
    """Micro-steps per optimizer step."""
    lr: float = 2e-3
    """Peak learning rate."""
    warmup: int = 20
    """Steps from 0 to the peak; a half cosine follows."""
    layers: int = 6
    """Transformer blocks."""
    width: int = 192
    """Features of a token."""
    context: int = 128
    """Bytes that the model sees; a window holds one more."""
    train_windows: int = 1280
    """Windows of text per epoch."""
    val_windows: int = 128
    """Windows of held-out text."""
    max_bytes: int = 16_000_000
    """Text beyond this is not read."""
    tell_every: int = 10
    """Steps between lines of progress."""
    evaluate_every: int = 40
    """Steps between evaluations."""
    save_every: int = 80
    """Steps between checkpoints."""
    seed: int = 0
    """Initial weights, windows and their order."""


class Progress:
    """How far a run has come; saved and loaded with everything else."""

    def __init__(self) -> None:
        self.step = self.epoch = self.batch = 0

    def state_dict(self) -> dict[str, int]:
        """The counters."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from ``state``."""
        vars(self).update(state)


class Pace:
    """Speed and remaining time of this process's steps, for people who watch; nothing of it is saved.

    Args:
        first: steps that were done before.
        last: steps at the end.
        samples: samples of a step, of all processes together.
    """

    def __init__(self, first: int, last: int, samples: int) -> None:
        self._first, self._last, self._samples = first, last, samples
        self._began = time.perf_counter()
        self._not_training = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around work that is no training step."""
        began = time.perf_counter()
        yield
        self._not_training += time.perf_counter() - began

    def tell(self, step: int) -> str:
        """``step 12/160, 34.1 samples/s, about 1 min 10 s left``, once ``step`` is done."""
        each = (time.perf_counter() - self._began - self._not_training) / (step - self._first)
        minutes, seconds = divmod(round((self._last - step) * each), 60)
        left = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
        return f"step {step:>4}/{self._last}, {self._samples / each:.1f} samples/s, about {left} left"


def main() -> None:
    """Read the command line and train."""
    options = from_command_line()
    accelerator = Accelerator(
        gradient_accumulation_steps=options.accumulate,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
        log_with=CSVTracker(options.output, METRICS),
    )
    train(accelerator, options)


def train(accelerator: Accelerator, options: Options) -> float:
    """Train, report, write the model; returns the last validation loss."""
    set_seed(options.seed)
    train_loader, val_loader = loaders(options)
    model = GPT2LMHeadModel(config(options))
    optimizer = torch.optim.AdamW(groups(model), lr=options.lr, betas=(0.9, 0.95))
    scheduler = get_cosine_schedule_with_warmup(optimizer, options.warmup, options.steps)
    model, optimizer, train_loader, val_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, val_loader, scheduler
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if options.resume is not None:
        accelerator.load_state(options.resume)
    accelerator.init_trackers("gpt2", config=asdict(options))

    val_loss = evaluate(accelerator, model, val_loader, progress.step)
    pace = Pace(progress.step, options.steps, options.batch_size * options.accumulate)
    for batch in batches(accelerator, train_loader, progress):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss  # the model shifts the labels itself
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        progress.step += 1
        train_loss = accelerator.gather(loss.detach()).mean().item()
        accelerator.log({"train_loss": train_loss, "lr": scheduler.get_last_lr()[0]}, step=progress.step)
        if progress.step % options.tell_every == 0 or progress.step == options.steps:
            accelerator.print(f"{pace.tell(progress.step)}, train loss {train_loss:.4f}")
        with pace.paused():
            if progress.step % options.evaluate_every == 0 or progress.step == options.steps:
                val_loss = evaluate(accelerator, model, val_loader, progress.step)
            if progress.step % options.save_every == 0:
                accelerator.save_state(f"{options.output}/step_{progress.step}")
        if progress.step >= options.steps:
            break
    write(accelerator, model, options)
    accelerator.end_training()
    return val_loss


def batches(accelerator: Accelerator, loader: Any, progress: Progress) -> Iterator[Tensor]:
    """Training batches without end, from where a resumed run has stopped."""
    while True:
        loader.set_epoch(progress.epoch)
        for batch in accelerator.skip_first_batches(loader, progress.batch) if progress.batch else loader:
            progress.batch += 1
            yield batch
        progress.epoch += 1
        progress.batch = 0


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: Any, step: int) -> float:
    """Mean loss on held-out text, told and logged."""
    model.eval()
    losses = []
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch))))
    model.train()
    val_loss = torch.cat(losses).mean().item()
    accelerator.print(f"step {step:>4}  validation loss {val_loss:.4f}, perplexity {math.exp(val_loss):.2f}")
    accelerator.log({"val_loss": val_loss}, step=step)
    return val_loss


def write(accelerator: Accelerator, model: Any, options: Options) -> None:
    """Write the model as any other of transformers, and let it write some text."""
    folder = f"{options.output}/model"
    accelerator.wait_for_everyone()
    # On all ranks, and without a state dict, which would be the whole model in one place.
    accelerator.unwrap_model(model).save_pretrained(folder, is_main_process=accelerator.is_main_process)
    if accelerator.is_main_process:
        trained = GPT2LMHeadModel.from_pretrained(folder)  # in eval mode
        text = sample(lambda tokens: trained(tokens).logits, prompt=b"def ", length=200, context=options.context)
        print(f"\n--- sampled from {folder} ---\n{text}\n---")


def loaders(options: Options) -> tuple[DataLoader[Tensor], DataLoader[Tensor]]:
    """Windows of training text at random places, and of held-out text at even distances."""
    documents = standard_library() if options.path is None else read_folder(Path(options.path))
    train_text, val_text = split(bounded(documents, options.max_bytes))
    length = options.context + 1
    generator = torch.Generator().manual_seed(options.seed)
    random = torch.randint(train_text.numel() - length + 1, (options.train_windows,), generator=generator)
    even = torch.linspace(0, val_text.numel() - length, options.val_windows, dtype=torch.float64).long()
    return (
        DataLoader(Windows(train_text, random, length), batch_size=options.batch_size, shuffle=True),
        DataLoader(Windows(val_text, even, length), batch_size=options.batch_size),
    )


def config(options: Options) -> GPT2Config:
    """A small GPT-2 over bytes, without dropout: one process would draw other masks than several."""
    return GPT2Config(
        vocab_size=256,
        n_positions=options.context + 1,
        n_layer=options.layers,
        n_head=6,
        n_embd=options.width,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameters for the optimizer: matrices decay, vectors do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def from_command_line() -> Options:
    """``--steps 20`` and so on: a flag for every option."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Options):
        assert field.default is not MISSING
        kind = str if field.default is None else type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    return Options(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
