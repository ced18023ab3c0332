"""``transformers.Trainer`` with its model on several ranks: the numbers of one plain Trainer."""

import warnings

import numpy as np
import pytest
import torch
from hf_checks import (
    EXACT,
    VOCABULARY,
    Sentences,
    Sequences,
    alone,
    arguments,
    classifier,
    language_model,
    logged,
    on_ranks,
    text_trainer,
    weights_of,
)
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

from smp_strategy.errors import ConfigError
from smp_strategy.integrations.accelerate import hf_trainer

PP2 = {"pipeline_parallel_degree": 2, "microbatches": 4}
# The same microbatches as with PP2 and 8 samples per batch, one after the other.
ONE_BY_ONE = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
LAYOUTS = {
    "pp2 x dp2": (4, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    "sdp2": (2, {"sharded_data_parallel_degree": 2}),
    "tp2": (2, {"tensor_parallel_degree": 2}),
}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def assert_close(found, expected, rtol=1e-4):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=1e-5, msg=name)


def train(folder, smp=None, **options):
    trainer = text_trainer(folder, smp, **{**EXACT, **options})
    trainer.train()
    return logged(trainer), weights_of(trainer), logged(trainer, "grad_norm"), trainer.state.total_flos


# --- The numbers of training ----------------------------------------------------------------------------------------


def test_a_language_model_is_trained_as_by_one_plain_trainer_bit_for_bit(tmp_path):
    one_by_one = {**ONE_BY_ONE, "gradient_accumulation_steps": 8}
    losses, weights, norms, flos = alone(train, tmp_path, optim="sgd", **one_by_one)
    first, second = on_ranks(train, 2, tmp_path, PP2, optim="sgd", gradient_accumulation_steps=2)
    assert_same(first[1], weights)
    assert_same(second[1], weights)
    for found in (first, second):
        assert found[0] == pytest.approx(losses, rel=1e-6)
        assert found[2] == pytest.approx(norms, rel=1e-5)
        assert found[3] == flos


def test_the_default_optimizer_clipping_and_schedule_give_the_same_numbers(tmp_path):
    options = {"learning_rate": 1e-3, "max_grad_norm": 0.3, "lr_scheduler_type": "linear", "warmup_steps": 2}
    expected = alone(train, tmp_path, **options, **ONE_BY_ONE)
    found, _ = on_ranks(train, 2, tmp_path, PP2, **options)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert_close(found[1], expected[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_give_the_same_numbers(layout, tmp_path):
    ranks, smp = LAYOUTS[layout]
    readers = 1 if layout == "tp2" else 2
    expected = alone(train, tmp_path, per_device_train_batch_size=8, optim="sgd")
    for found in on_ranks(train, ranks, tmp_path, smp, per_device_train_batch_size=8 // readers, optim="sgd"):
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        assert found[3] == expected[3]
        if found[1]:
            assert_close(found[1], expected[1])


def train_classifier(folder, smp=None, *, means=False, **options):
    """A model that takes the number of items in the batch and does not use it: its loss is a mean."""
    trainer = Trainer(
        model=classifier(),
        args=arguments(folder, smp, optim="sgd", **{**EXACT, **options}),
        train_dataset=Sentences(),
        eval_dataset=Sentences(13, seed=1),
        compute_metrics=metrics,
    )
    if means:
        trainer.loss_is_scaled_for_ga = False  # Transformers believes that the model has used that number
    trainer.train()
    predicted = trainer.predict(Sentences(13, seed=1))
    return logged(trainer), weights_of(trainer), trainer.evaluate(), predicted


def metrics(predicted):
    logits, labels = predicted
    return {"accuracy": float((logits.argmax(-1) == labels).mean()), "samples": len(labels), "sum": float(logits.sum())}


def test_a_model_that_averages_over_its_batch_is_trained_and_evaluated_the_same(tmp_path):
    losses, weights, scores, expected = alone(train_classifier, tmp_path, means=True, **ONE_BY_ONE)
    for rank, found in enumerate(on_ranks(train_classifier, 2, tmp_path, PP2)):
        assert found[0] == pytest.approx(losses, rel=1e-6)
        if rank == 0:
            assert_same(found[1], weights)
        for name in ("eval_accuracy", "eval_samples", "eval_sum", "eval_loss"):
            assert found[2][name] == pytest.approx(scores[name], rel=1e-5), name
        np.testing.assert_allclose(found[3].predictions, expected.predictions, rtol=1e-5, atol=1e-6)
        assert np.array_equal(found[3].label_ids, expected.label_ids)


def test_replicas_evaluate_their_share_as_the_processes_of_a_plain_trainer(tmp_path):
    _, _, scores, _ = on_ranks(train_classifier, 2, tmp_path, num_train_epochs=0.01, learning_rate=0.0)[0]
    smp = LAYOUTS["pp2 x dp2"][1]
    for found in on_ranks(train_classifier, 4, tmp_path, smp, num_train_epochs=0.01, learning_rate=0.0):
        for name in ("eval_accuracy", "eval_samples", "eval_sum", "eval_loss"):
            assert found[2][name] == pytest.approx(scores[name], rel=1e-5), name


def squared(outputs, labels, num_items_in_batch=None):
    loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / num_items_in_batch


OUTSIDE = {"label smoothing": {"label_smoothing_factor": 0.1}, "a function": {"compute_loss_func": squared}}


@pytest.mark.parametrize("options", OUTSIDE.values(), ids=OUTSIDE)
def test_losses_outside_of_the_model(options, tmp_path):
    expected = alone(train, tmp_path, optim="sgd", **options)
    found, _ = on_ranks(train, 2, tmp_path, PP2, optim="sgd", **options)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert_close(found[1], expected[1])


def test_checkpointed_activations_change_nothing(tmp_path):
    expected = alone(train, tmp_path, optim="sgd", **ONE_BY_ONE)
    found = on_ranks(train, 2, tmp_path, PP2, optim="sgd", activation_checkpointing=True)
    assert_same(found[0][1], expected[1])


# --- Files ------------------------------------------------------------------------------------------------------------


def run(folder, smp=None, *, resume=None, model=None, **options):
    """Two epochs with a checkpoint after each third step; optionally what follows on one of them."""
    defaults = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3, "learning_rate": 1e-2}
    trainer = text_trainer(folder, smp, model and model(), **{**defaults, **options})
    result = trainer.train(resume_from_checkpoint=resume)
    return logged(trainer), weights_of(trainer), result.global_step, trainer.state.best_model_checkpoint


def dropping():
    return language_model(dropout=0.2)


@pytest.mark.dear
def test_a_run_with_random_numbers_goes_on_in_the_middle_of_an_epoch_bit_for_bit(tmp_path):
    whole, _ = on_ranks(run, 2, tmp_path / "whole", PP2, model=dropping)
    resume = tmp_path / "whole" / "checkpoint-3"
    rest, _ = on_ranks(run, 2, tmp_path / "rest", PP2, model=dropping, resume=str(resume))
    assert rest[0] == whole[0]  # the log of the first three steps comes from the file
    assert_same(rest[1], whole[1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run in one plain process, and one on two stages: their folders, and what the plain one has found."""
    folder = tmp_path_factory.mktemp("runs")
    expected = alone(run, folder / "one")
    on_ranks(run, 2, folder / "two", PP2)
    return folder / "one", folder / "two", expected


@pytest.mark.parametrize("reads", ["one", "pp2", "sdp2"])
def test_a_run_goes_on_under_another_layout(reads, tmp_path, runs):
    one, two, expected = runs
    if reads == "one":
        found = alone(run, tmp_path, resume=str(two / "checkpoint-3"))
    elif reads == "pp2":
        found = on_ranks(run, 2, tmp_path, PP2, resume=str(one / "checkpoint-3"))[0]
    else:
        ranks, smp = LAYOUTS["sdp2"]
        resume = {"resume": str(two / "checkpoint-3"), "per_device_train_batch_size": 4}
        found = on_ranks(run, ranks, tmp_path, smp, **resume)[0]
    assert found[2] == expected[2] == 8
    assert_close(found[1], expected[1], rtol=1e-3)


def test_checkpoints_have_the_files_of_a_plain_trainer(runs):
    one, two = (folder / "checkpoint-3" for folder in runs[:2])
    assert {path.name for path in two.iterdir()} == {path.name for path in one.iterdir()} | {"smp_strategy.bin"}
    mine, theirs = (torch.load(path / "optimizer.pt", weights_only=True) for path in (two, one))
    assert mine["param_groups"] == theirs["param_groups"]
    assert list(mine["state"]) == list(theirs["state"])
    for number, state in theirs["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(mine["state"][number][key], value, rtol=1e-3, atol=1e-6)
    model = GPT2LMHeadModel.from_pretrained(two)
    assert_close(model.state_dict(), GPT2LMHeadModel.from_pretrained(one).state_dict())
    mine, theirs = (torch.load(path / "training_args.bin", weights_only=False) for path in (two, one))
    assert type(mine) is type(theirs)


def best_of(folder, smp=None):
    options = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_strategy": "steps"}
    options |= {"save_strategy": "steps"}
    options |= {"save_total_limit": 1, "eval_steps": 1, "save_steps": 1, "num_train_epochs": 1}
    trainer = text_trainer(folder, smp, **{**EXACT, "optim": "sgd", "learning_rate": 4.0, **options})
    trainer.train()
    return trainer.state.best_global_step, trainer.evaluate()["eval_loss"], weights_of(trainer)


def test_the_best_weights_come_back_at_the_end_and_old_checkpoints_go(tmp_path):
    expected = alone(best_of, tmp_path / "one")
    found = on_ranks(best_of, 2, tmp_path / "two", PP2)
    for each in found:
        assert each[0] == expected[0]
        assert each[1] == pytest.approx(expected[1], rel=1e-4)
    assert_close(found[0][2], expected[2], rtol=1e-3)
    for name in ("one", "two"):
        assert [path.name for path in (tmp_path / name).iterdir()] == [f"checkpoint-{expected[0]}"]


def best_adapter_of(folder, smp=None):
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, task_type="CAUSAL_LM")
    options = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_strategy": "steps"}
    options |= {"save_strategy": "steps", "eval_steps": 1, "save_steps": 1, "optim": "sgd", "learning_rate": 0.5}
    model = get_peft_model(language_model(), config)
    trainer = text_trainer(folder, smp, model, **{**EXACT, **options})
    trainer.train()
    files = {path.name for path in (folder / "checkpoint-1").iterdir()}
    return trainer.state.best_global_step, trainer.evaluate()["eval_loss"], files


def test_adapters_are_saved_by_themselves_and_the_best_come_back(tmp_path):
    step, loss, files = alone(best_adapter_of, tmp_path / "one")
    for found in on_ranks(best_adapter_of, 2, tmp_path / "two", PP2):
        assert found[0] == step
        assert found[1] == pytest.approx(loss, rel=1e-5)
        assert found[2] == files | {"smp_strategy.bin"}


# --- Around training --------------------------------------------------------------------------------------------------


def several_runs(folder, smp=None):
    trainer = text_trainer(folder, smp, **EXACT, optim="sgd")
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    between = trainer.evaluate()["eval_loss"]
    trainer.train()
    trainer.save_model(folder / "saved")
    return before, between, trainer.evaluate()["eval_loss"], trainer.is_world_process_zero()


@pytest.mark.dear
def test_a_trainer_evaluates_trains_evaluates_and_trains_again(tmp_path):
    expected = alone(several_runs, tmp_path / "one")
    first, second = on_ranks(several_runs, 2, tmp_path / "two", PP2)
    for found in (first, second):
        assert found[:3] == pytest.approx(expected[:3], rel=1e-5)
    assert [first[3], second[3]] == [True, False]
    assert (tmp_path / "two" / "saved" / "model.safetensors").is_file()


class Halved(Trainer):
    """What users do: a method of their own, which calls the Trainer's."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        return (0.5 * loss, outputs) if return_outputs else 0.5 * loss

    def _save(self, output_dir=None, state_dict=None):
        self.saved = True
        super()._save(output_dir, state_dict)


def subclassed(folder, smp=None):
    trainer = text_trainer(folder, smp, kind=Halved, **EXACT, optim="sgd", save_strategy="epoch")
    trainer.train()
    plain = text_trainer(folder) if smp is None else None
    names = [each.__name__ for each in type(trainer).__mro__[:4]]
    return weights_of(trainer), trainer.saved, names, isinstance(trainer, Halved), plain and type(plain) is Trainer


def test_methods_of_a_subclass_stay_in_front(tmp_path):
    expected, found = alone(subclassed, tmp_path / "one"), on_ranks(subclassed, 2, tmp_path / "two", PP2)[0]
    assert found[1:4] == (True, ["Halved", "Halved", "SMPTrainer", "Trainer"], True)
    assert expected[4]
    assert_close(found[0], expected[0])


class Dealing(Trainer):
    """As sentence-transformers does: after the loop, it asks whether ranks may run the model by themselves."""

    def evaluation_loop(self, *args, **kwargs):
        output = super().evaluation_loop(*args, **kwargs)
        self.is_sharded = self.is_fsdp_enabled
        return output


def dealt(folder, smp):
    trainer = text_trainer(folder, smp, kind=Dealing)
    trainer.evaluate()
    seen = [trainer.is_sharded, trainer.is_fsdp_enabled]
    trainer.predict(trainer.eval_dataset)
    return [*seen, trainer.is_sharded, trainer.is_fsdp_enabled]


@pytest.mark.parametrize(("smp", "is_sharded"), [(PP2, True), ({"sharded_data_parallel_degree": 2}, True), ({}, False)])
def test_a_subclass_learns_after_an_evaluation_that_ranks_need_each_other(smp, is_sharded, tmp_path):
    for found in on_ranks(dealt, 2, tmp_path, {"pipeline_parallel_degree": 1, **smp}):
        assert found == [is_sharded, False] * 2


def generated(folder, smp=None):
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))
    options = {"predict_with_generate": True, "generation_max_length": 6, "kind": Seq2SeqTrainingArguments}
    args = arguments(folder, smp, **options)
    trainer = Seq2SeqTrainer(model=model, args=args, eval_dataset=Sequences(), train_dataset=Sequences())
    predicted = trainer.predict(Sequences())
    return predicted.predictions, predicted.metrics["test_loss"]


@pytest.mark.dear
def test_sequences_are_generated_as_by_one_process(tmp_path):
    tokens, loss = alone(generated, tmp_path)
    for found in on_ranks(generated, 2, tmp_path, PP2):
        assert np.array_equal(found[0], tokens)
        assert found[1] == pytest.approx(loss, rel=1e-5)


def counted(folder, smp):
    trainer = text_trainer(folder, smp)
    args = trainer.args
    loader = trainer.get_train_dataloader()
    return args.world_size, args.process_index, len(loader), trainer.get_total_train_batch_size(args), args.should_save


def test_the_arguments_count_replicas_and_one_process_saves(tmp_path):
    found = on_ranks(counted, 4, tmp_path, LAYOUTS["pp2 x dp2"][1])
    assert {each[:1] + each[2:4] for each in found} == {(2, 2, 16)}
    assert sorted(each[1] for each in found) == [0, 0, 1, 1]
    assert [each[4] for each in found] == [True, False, False, False]


# --- What cannot be served --------------------------------------------------------------------------------------------


def refused(folder, smp=None, **options):
    try:
        text_trainer(folder, smp or {}, **options)
    except ConfigError as error:
        return str(error)
    return ""


def test_arguments_that_cannot_be_served_are_named_all_at_once(tmp_path):
    wrong = {"save_on_each_node": True, "auto_find_batch_size": True, "bf16_full_eval": True, "optim": "lomo"}
    [message] = on_ranks(refused, 1, tmp_path, **wrong)
    assert "4 options are wrong" in message
    for name in ("save_on_each_node=True", "auto_find_batch_size=True", "bf16_full_eval=True", "optim=lomo"):
        assert name in message


def test_forms_of_checkpoints_that_the_trainer_does_not_have_are_refused(tmp_path):
    [message] = on_ranks(refused, 1, tmp_path, {"state_dict_type": "sharded", "async_save": True})
    for name in ("state_dict_type='sharded'", "async_save=True"):
        assert f"`{name}` is not offered under `transformers.Trainer`" in message


def another_version(folder, *, version, without=None):
    hf_trainer.transformers.__version__ = version
    if without is not None:
        delattr(Trainer, without)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            text_trainer(folder, {})
        except ConfigError as error:
            return str(error)
    return "\n".join(str(each.message) for each in caught)


def test_another_version_is_warned_of_or_refused_if_it_lacks_what_we_replace(tmp_path):
    [warned] = on_ranks(another_version, 1, tmp_path, version="5.99.0")
    assert "`transformers.Trainer` is that of Transformers 5.99.0, while smp_strategy is tested with 5.23" in warned
    [error] = on_ranks(another_version, 1, tmp_path, version="5.99.0", without="_save_rng_state")
    assert "its methods _save_rng_state differ" in error
    assert "Install transformers==5.23.*" in error
