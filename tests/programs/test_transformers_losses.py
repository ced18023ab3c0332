"""transformers' Trainer, as in its scripts `run_clip`, `run_mlm` and `run_ner`: losses are those of whole batches."""

import pytest
import torch
from program_checks import PP2, alone, assert_alike, on_ranks
from torch.utils.data import Dataset, SequentialSampler
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPVisionConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

LENGTH, VOCABULARY, BATCH, STEPS = 12, 40, 8, 3
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
NO_DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)


class Samples(Dataset):
    """Texts of which few tokens have labels, with images; a batch of two is left at the end of an evaluation."""

    def __init__(self, program, samples):
        generator = torch.Generator().manual_seed(7)
        self.program = program
        self.tokens = torch.randint(3, VOCABULARY, (samples, LENGTH), generator=generator)
        self.images = torch.randn(samples, 3, 8, 8, generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        if self.program == "clip":
            mask = torch.ones_like(tokens)
            return {"input_ids": tokens, "attention_mask": mask, "pixel_values": self.images[index]}
        is_labelled = torch.arange(LENGTH) < (1, 0, 9, 2, 0, 0, 12, 3)[index % 8]
        if self.program == "ner":
            return {"input_ids": tokens, "labels": torch.where(is_labelled, tokens % 5, -100)}
        return {"input_ids": tokens.masked_fill(is_labelled, 2), "labels": tokens.masked_fill(~is_labelled, -100)}


def model_of(program):
    torch.manual_seed(1)
    if program == "clip":
        sizes = {**SIZES, "projection_dim": 8}
        text = CLIPTextConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, eos_token_id=2, **sizes)
        vision = CLIPVisionConfig(image_size=8, patch_size=4, **sizes)
        return CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8))
    config = BertConfig(vocab_size=VOCABULARY, num_labels=5, tie_word_embeddings=False, **SIZES, **NO_DROPOUT)
    return {"mlm": BertForMaskedLM, "ner": BertForTokenClassification}[program](config)


def collated(samples):
    batch = default_data_collator(samples)
    return batch if "labels" in batch else {**batch, "return_loss": True}


class InOrder(Trainer):
    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)


def trained(folder, program, smp=None, **options):
    if smp is not None:
        from smp_strategy import SMPPlugin

        options["parallelism_config"] = SMPPlugin(**smp)
    args = TrainingArguments(
        output_dir=str(folder),
        **{"use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 3, "save_strategy": "no"},
        **{"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH, "num_train_epochs": 1},
        **{"logging_steps": 1, "optim": "sgd", "lr_scheduler_type": "constant"},
        **{"dataloader_pin_memory": False, "eval_strategy": "epoch"},
        **{"learning_rate": 0.05, **options},
    )
    data = Samples(program, STEPS * BATCH), Samples(program, 2 * BATCH + 2)
    trainer = InOrder(model_of(program), args, collated, train_dataset=data[0], eval_dataset=data[1])
    trainer.train()
    history = trainer.state.log_history
    losses = [[entry[name] for entry in history if name in entry] for name in ("loss", "eval_loss")]
    if smp is None:
        return losses, {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    return losses, trainer.accelerator.get_state_dict(trainer.model)


@pytest.mark.parametrize(
    ("program", "smp"), [("mlm", PP2), ("ner", PP2), ("clip", {}), ("clip", {**PP2, "microbatches": 1})]
)
def test_it_trains_and_evaluates_as_in_one_process(program, smp, tmp_path):
    expected = alone(trained, tmp_path / "alone", program)
    for found in on_ranks(trained, 2, tmp_path / "ranks", program, smp):
        assert_alike(found, expected)


def test_microbatches_of_clip_evaluate_whole_batches(tmp_path):
    """Without a learning rate, so that the weights are those of one process."""
    expected = alone(trained, tmp_path / "alone", "clip", learning_rate=0.0)[0][1]
    for found in on_ranks(trained, 2, tmp_path / "ranks", "clip", PP2, learning_rate=0.0):
        assert_alike(found[0][1], expected)
