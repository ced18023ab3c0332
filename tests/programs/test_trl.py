"""TRL's trainers, whose losses are computed from results of the model that stand beside its loss."""

import math

import pytest
from datasets import Dataset
from program_checks import LAYOUTS, alone, assert_alike, on_ranks
from texts import language_model, reward_model, sentences, tokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

COUNT = 32


def settings(kind, folder, smp, **options):
    if smp is not None:
        from smp_strategy.integrations.accelerate.plugin import SMPPlugin

        options["parallelism_config"] = SMPPlugin(**smp)
    defaults = {
        **{"use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 3, "save_strategy": "no", "bf16": False},
        **{"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "num_train_epochs": 1},
        **{"logging_strategy": "steps", "logging_steps": 1, "dataloader_pin_memory": False, "optim": "sgd"},
        **{"learning_rate": 0.1, "lr_scheduler_type": "constant"},
    }
    return kind(output_dir=str(folder), **{**defaults, **options})


def outcome(trainer):
    trainer.train()
    trainer.evaluate()
    if hasattr(trainer.accelerator, "smp"):
        weights = trainer.accelerator.get_state_dict(trainer.model)
    else:
        weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    timing = ("runtime", "per_second", "flos")
    kept = [
        {name: value for name, value in entry.items() if not any(word in name for word in timing)}
        for entry in trainer.state.log_history
    ]
    return kept, weights


def sft(folder, smp=None, **options):
    return outcome(
        SFTTrainer(
            model=language_model(),
            args=settings(SFTConfig, folder, smp, **options),
            train_dataset=Dataset.from_dict({"text": sentences(COUNT)}),
            eval_dataset=Dataset.from_dict({"text": sentences(9, 5)}),
            processing_class=tokenizer(),
        )
    )


def pairs(count):
    found = sentences(2 * count)
    return Dataset.from_dict(
        {"prompt": sentences(count, 4), "chosen": found[:count], "rejected": list(reversed(found[count:]))}
    )


def dpo(folder, smp=None, **options):
    return outcome(
        DPOTrainer(
            model=str(folder / "start"),
            args=settings(DPOConfig, folder, smp, **options),
            train_dataset=pairs(COUNT),
            eval_dataset=pairs(9),
            processing_class=tokenizer(),
        )
    )


def reward(folder, smp=None, **options):
    return outcome(
        RewardTrainer(
            model=reward_model(),
            args=settings(RewardConfig, folder, smp, **options),
            train_dataset=pairs(COUNT),
            eval_dataset=pairs(9),
            processing_class=tokenizer(),
        )
    )


def short_answers(completions, **_):
    return [-float(len(each.split())) for each in completions]


def grpo(folder, smp=None, **options):
    model = language_model()
    return outcome(
        GRPOTrainer(
            model=model,
            reward_funcs=short_answers,
            args=settings(GRPOConfig, folder, smp, max_completion_length=6, num_generations=4, **options),
            train_dataset=Dataset.from_dict({"prompt": sentences(8, 4)}),
            eval_dataset=Dataset.from_dict({"prompt": sentences(4, 3)}),
            processing_class=tokenizer(),
        )
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("program", [sft, dpo, reward], ids=lambda each: each.__name__)
def test_it_trains_as_in_one_process(program, layout, tmp_path):
    language_model().save_pretrained(tmp_path / "start")
    readers = 2 if layout == "sdp2" else 1
    expected = alone(program, tmp_path)
    found = on_ranks(program, 2, tmp_path, LAYOUTS[layout], per_device_train_batch_size=8 // readers)
    for logs, weights in found:
        if layout == "tp2":  # rewards are zero up to rounding in the first step, and accuracies compare them
            for entry in (*logs, *expected[0]):
                entry.pop("rewards/accuracies", None)
        # Replicas evaluate batches of their own, and losses are means over the tokens of a batch.
        steps = slice(-1) if layout == "sdp2" else slice(None)
        assert_alike(logs[steps], expected[0][steps])
        if weights:
            assert_alike(weights, expected[1])


def test_answers_are_sampled_scored_and_trained_on(tmp_path):
    # Random numbers of a step are drawn from streams of its own, so one process samples other answers.
    first, second = on_ranks(grpo, 2, tmp_path, LAYOUTS["pp2"])
    assert len(first[0]) == len(second[0]) > 4
    for entry in (*first[0], *second[0]):
        entry.pop("step_time", None)
    assert_alike(second[0], first[0])
    assert all(math.isfinite(entry["loss"]) for entry in first[0] if "loss" in entry)
