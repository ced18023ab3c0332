"""A GPT-2 from random weights, as scripts for SageMaker's model parallel library train language models.

``torchrun --nproc-per-node 2 examples/sagemaker_gpt.py --pipeline_parallel_degree 2 --microbatches 2 --fp16 1``
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPT2Config, GPT2LMHeadModel

import smp_strategy.smp as smp
from corpus import bounded, standard_library

__all__ = ["batches", "main", "model_config", "parameter_groups", "parsed"]


@smp.step
def train_step(
    model: smp.DistributedModel, input_ids: Tensor, attention_mask: Tensor, args: argparse.Namespace
) -> Tensor:
    """Forward and backward of a microbatch."""
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    return loss


@smp.step
def validation_step(model: smp.DistributedModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Loss of a microbatch."""
    return model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]


def model_config(args: argparse.Namespace) -> GPT2Config:
    """Size of the model."""
    return GPT2Config(
        vocab_size=256,
        n_positions=args.max_context_width,
        n_embd=args.hidden_width,
        n_layer=args.num_layers,
        n_head=args.num_heads,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )


def batches(args: argparse.Namespace, rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows of text of one replica, and masks of ones."""
    text = b"".join(bounded(standard_library(), 200_000))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    windows = tokens[: len(tokens) // args.max_context_width * args.max_context_width].view(-1, args.max_context_width)
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.max_steps * args.gradient_accumulation):
        chosen = torch.randint(len(windows), (args.train_batch_size * size,), generator=generator)
        ids = windows[chosen][rank::size].long()
        yield ids, torch.ones_like(ids)


def parameter_groups(model: Any) -> list[dict[str, Any]]:
    """Parameters with weight decay, and biases and layer norms without."""
    decayed = [each for _, each in model.named_parameters() if each.ndim > 1]
    others = [each for _, each in model.named_parameters() if each.ndim <= 1]
    return [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]


def train(model: Any, optimizer: Any, scheduler: LambdaLR, args: argparse.Namespace, start: int) -> int:
    """Train the rest of the steps; returns their number."""
    step = start
    windows = batches(args, smp.rdp_rank(), smp.rdp_size())
    for _ in range(start * args.gradient_accumulation):
        next(windows)
    while step < args.max_steps:
        optimizer.zero_grad(set_to_none=True)
        losses = [train_step(model, *next(windows), args).reduce_mean() for _ in range(args.gradient_accumulation)]
        if args.fp16:
            optimizer.clip_master_grads(args.grad_clip)
        optimizer.step()
        if not optimizer.overflow:
            scheduler.step()
        step += 1
        if smp.rank() == 0:
            print(
                f"step {step} loss {torch.stack(losses).mean().item():.7f} scale {optimizer.loss_scale:g}", flush=True
            )
        if args.checkpoint_freq and step % args.checkpoint_freq == 0:
            content = {"step": step, "lr_scheduler": scheduler.state_dict()}
            smp.save_checkpoint(
                args.checkpoint_dir,
                tag=f"step_{step}",
                partial=True,
                model=model,
                optimizer=optimizer,
                user_content=content,
                num_kept_partial_checkpoints=2,
            )
    return step


def validate(model: Any, args: argparse.Namespace) -> None:
    """Print the loss on some windows."""
    model.eval()
    with torch.no_grad():
        ids, mask = next(batches(args, smp.rdp_rank(), smp.rdp_size()))
        loss = validation_step(model, ids, mask).reduce_mean()
    if smp.rank() == 0:
        print(f"validation loss {loss.item():.7f}", flush=True)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """Hyperparameters, which SageMaker passes on the command line."""
    parser = argparse.ArgumentParser()
    for name, default in {
        **{"pipeline_parallel_degree": 2, "tensor_parallel_degree": 1, "sharded_data_parallel_degree": 1},
        **{"microbatches": 2, "train_batch_size": 4, "gradient_accumulation": 1, "max_steps": 6, "seed": 12345},
        **{"num_layers": 4, "num_heads": 4, "hidden_width": 64, "max_context_width": 32},
        **{"activation_checkpointing": 1, "fp16": 0, "shard_optimizer_state": 0, "checkpoint_freq": 0},
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--grad_clip", type=float, default=1.0)
    parser.add_argument("--checkpoint_dir", type=Path, default=Path(os.environ.get("SM_MODEL_DIR", "checkpoints")))
    parser.add_argument("--load_partial", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> None:
    """Train a model of that size."""
    args = parsed()
    smp.init(
        {
            "ddp": True,
            "pipeline_parallel_degree": args.pipeline_parallel_degree,
            "tensor_parallel_degree": args.tensor_parallel_degree,
            "sharded_data_parallel_degree": args.sharded_data_parallel_degree,
            "microbatches": args.microbatches,
            "shard_optimizer_state": bool(args.shard_optimizer_state),
            "prescaled_batch": True,
            "optimize": "speed",
            "fp16": bool(args.fp16),
        }
    )
    torch.manual_seed(args.seed)
    with smp.model_creation(tensor_parallelism=smp.tp_size() > 1, dtype=torch.get_default_dtype()):
        plain = GPT2LMHeadModel(model_config(args))
    model = smp.DistributedModel(plain, backward_passes_per_step=args.gradient_accumulation)
    if args.activation_checkpointing:
        for layer in plain.transformer.h.children():
            smp.set_activation_checkpointing(layer)
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(parameter_groups(model), lr=args.lr, eps=1e-5),
        static_loss_scale=None,
        dynamic_loss_scale=bool(args.fp16),
        dynamic_loss_args={"init_scale": 2.0**12, "scale_window": 1000, "min_scale": 1, "delayed_shift": 2},
    )
    scheduler = LambdaLR(optimizer.optimizer, lambda step: 1 - step / (2 * args.max_steps))
    start = 0
    if args.load_partial:
        content = smp.resume_from_checkpoint(args.checkpoint_dir, partial=True)
        start = content["step"]
        scheduler.load_state_dict(content["lr_scheduler"])
    train(model, optimizer, scheduler, args, start)
    validate(model, args)


if __name__ == "__main__":
    main()
