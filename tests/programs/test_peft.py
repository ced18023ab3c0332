"""PEFT: adapters under ``transformers.Trainer``."""

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from program_checks import LAYOUTS, alone, assert_alike, on_ranks
from texts import language_model, sentences, tokenizer
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

ADAPTERS = {
    "lora": lambda: LoraConfig(r=4, lora_dropout=0.0, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    "lora, head": lambda: LoraConfig(r=4, target_modules=["c_attn"], modules_to_save=["lm_head"], fan_in_fan_out=True),
    "dora": lambda: LoraConfig(r=4, target_modules=["c_attn"], use_dora=True, fan_in_fan_out=True),
    "ia3": lambda: IA3Config(target_modules=["c_attn", "c_fc"], feedforward_modules=["c_fc"], fan_in_fan_out=True),
}


def train(folder, name, smp=None, **options):
    if smp is not None:
        from smp_strategy import SMPPlugin

        options["parallelism_config"] = SMPPlugin(**smp)
    model = language_model()
    torch.manual_seed(2)
    model = get_peft_model(model, ADAPTERS[name]())
    words = tokenizer()
    args = TrainingArguments(
        output_dir=str(folder),
        **{"use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 3, "save_strategy": "no"},
        **{"num_train_epochs": 2, "logging_steps": 1, "learning_rate": 0.2},
        **{"optim": "sgd", "lr_scheduler_type": "constant", "dataloader_pin_memory": False},
        **{"per_device_train_batch_size": 8, **options},
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=[words(each, truncation=True, max_length=10) for each in sentences(32, 12)],
        data_collator=DataCollatorForLanguageModeling(words, mlm=False),
    )
    trainer.train()
    trainer.save_model(str(folder / f"{'plain' if smp is None else 'smp'}"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if smp is None:
        return losses, {key: value.detach().clone() for key, value in model.state_dict().items()}
    return losses, trainer.accelerator.get_state_dict(trainer.model)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_train_as_in_one_process(name, layout, tmp_path):
    readers = 2 if layout == "sdp2" else 1
    expected = alone(train, tmp_path, name)
    for losses, weights in on_ranks(
        train, 2, tmp_path, name, LAYOUTS[layout], per_device_train_batch_size=8 // readers
    ):
        assert_alike(losses, expected[0])
        if weights:
            assert_alike(weights, expected[1])
    plain, found = (sorted(each.name for each in (tmp_path / name).iterdir()) for name in ("plain", "smp"))
    assert found == plain
