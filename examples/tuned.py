"""A pretrained language model of Hugging Face in a LightningModule: whole, or with adapters of PEFT.

Nothing here is parallel. ``configure_model`` loads the model as in a single process; under
``delayed_parameter_initialization`` each rank reads what it holds, once there is a partition.
"""

from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from optimization import Recipe
from text import TextData

__all__ = ["TokenData", "TunedModel"]


class TunedModel(L.LightningModule):
    """Next-token prediction with a pretrained model.

    Args:
        folder: folder of the pretrained model; ``None``: a tiny model of bytes with random weights is made.
        tiny_folder: where the tiny model is written.
        optimization: optimizer and schedule.
        lora: adapters, which are trained instead of the weights; ``None``: the weights are.
    """

    def __init__(
        self, *, folder: str | None, tiny_folder: str, optimization: Recipe, lora: LoraConfig | None = None
    ) -> None:
        super().__init__()
        self.makes_it = folder is None
        self.folder = Path(tiny_folder if folder is None else folder)
        self.optimization = optimization
        self.lora = lora

    def prepare_data(self) -> None:
        """Write the tiny model; Lightning calls this in one process of a machine, before the others go on."""
        if self.makes_it and not self.folder.exists():
            with torch.random.fork_rng():
                torch.manual_seed(0)
                tiny_model().save_pretrained(self.folder, max_shard_size="300KB")

    def configure_model(self) -> None:
        """Load the pretrained model."""
        if not hasattr(self, "model"):
            model = AutoModelForCausalLM.from_pretrained(self.folder).train()  # it is loaded in evaluation mode
            self.model = model if self.lora is None else get_peft_model(model, self.lora)

    def training_step(self, windows: Tensor, batch_idx: int) -> Tensor:
        """The model's loss; it shifts the labels itself."""
        loss = self.loss(windows)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, windows: Tensor, batch_idx: int) -> None:
        """The same loss on held-out text, and its mean over replicas, if there are any."""
        self.log("val_loss", self.loss(windows), prog_bar=True, sync_dist=True)

    def loss(self, windows: Tensor) -> Tensor:
        """Mean loss of the tokens."""
        loss: Tensor = self.model(input_ids=windows, labels=windows, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with a warm-up and a half cosine, of what is trained."""
        return self.optimization.build(self)


def tiny_model() -> LlamaForCausalLM:
    """A model of bytes, with random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


class TokenData(TextData):
    """The windows of ``TextData`` in tokens.

    Args:
        tokenizer: folder of a pretrained tokenizer; ``None``: tokens are bytes.
        options: those of ``TextData``.
    """

    def __init__(self, *, tokenizer: str | None, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.tokenizer = tokenizer

    def setup(self, stage: str) -> None:
        """Read the text, and encode it; every process does the same."""
        is_read = bool(self.train_text.numel())
        super().setup(stage)
        if self.tokenizer is not None and not is_read:
            encode = AutoTokenizer.from_pretrained(self.tokenizer)
            self.train_text, self.val_text = (
                torch.tensor(encode(bytes(text.tolist()).decode(errors="replace")).input_ids)
                for text in (self.train_text, self.val_text)
            )
