"""What scripts gather, reduce and divide; and the public example with BERT, whose metric is that of one process."""

import functools
import os
from pathlib import Path
from pydoc_data.topics import topics
from zlib import crc32

import pytest
import sklearn.datasets
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProfileKwargs, set_seed
from accelerate_checks import fresh_accelerator, on_ranks, toy
from torch.utils.data import DataLoader
from torchmetrics.classification import BinaryF1Score
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

PP2 = {"pipeline_parallel_degree": 2, "microbatches": 2}
TP2 = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 1}
TRAINED, EVALUATED, BATCH = 96, 45, 8

# The loop of Accelerate's nlp_example: is this text about Python, or about a data set?


@functools.cache
def texts():
    """Pieces of Python's own help (0) and of scikit-learn's descriptions of data sets (1), in turn."""
    folder = Path(sklearn.datasets.__file__).parent / "descr"
    sources = " ".join(topics.values()), " ".join(each.read_text() for each in sorted(folder.glob("*.rst")))
    pieces = [[words[at : at + 12 + at % 9] for at in range(0, 12000, 120)] for words in map(str.split, sources)]
    return [(" ".join(piece), label) for pair in zip(*pieces, strict=False) for label, piece in enumerate(pair)]


def collate(samples):
    """Padded to the longest text of the batch; a word is a number, like some others."""
    encoded = [torch.tensor([1, *(2 + crc32(word.encode()) % 500 for word in text.split())]) for text, _ in samples]
    ids = torch.nn.utils.rnn.pad_sequence(encoded, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([each[1] for each in samples])}


def bert():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(
        BertConfig(vocab_size=502, max_position_embeddings=64, initializer_range=0.3, **sizes, **rates)
    )


def nlp_example(smp):
    """Train an epoch and evaluate, as the example does; ``BATCH`` is that of all replicas together."""
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    if smp is None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accelerator = Accelerator(cpu=True, dataloader_config=config)
    else:
        accelerator = fresh_accelerator(smp, dataloader_config=config)
    set_seed(42)
    model, metric = bert(), BinaryF1Score()
    size, data = BATCH // accelerator.num_processes, texts()
    train = DataLoader(data[:TRAINED], shuffle=True, collate_fn=collate, batch_size=size, drop_last=True)
    evaluation = DataLoader(data[TRAINED : TRAINED + EVALUATED], collate_fn=collate, batch_size=size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    # The scheduler is stepped once for each process in each step.
    scheduler = get_linear_schedule_with_warmup(optimizer, 2 * accelerator.num_processes, len(train))
    model, optimizer, train, evaluation, scheduler = accelerator.prepare(model, optimizer, train, evaluation, scheduler)
    losses, seen = [], 0
    model.train()
    for batch in train:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean())
    model.eval()
    for batch in evaluation:
        with torch.no_grad():
            outputs = model(**batch)
        predictions = outputs.logits.argmax(dim=-1)
        predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
        metric.update(predictions, references)
        seen += len(references)
    return float(metric.compute()), seen, torch.stack(losses), scheduler.get_last_lr()


@pytest.mark.dear
@pytest.mark.parametrize(("smp", "ranks"), [(PP2, 2), (PP2, 4), (TP2, 2)], ids=["pp2", "pp2xdp2", "tp2"])
def test_the_metric_of_the_nlp_example_is_that_of_one_process(smp, ranks, nlp_expected):
    metric, seen, losses, lr = nlp_expected
    assert 0.7 < metric < 1, "something was learnt, but not everything"
    for found in on_ranks(nlp_example, ranks, smp):
        assert found[:2] == (metric, EVALUATED) == (metric, seen)
        torch.testing.assert_close(found[2], losses, rtol=1e-4, atol=1e-5)
        assert found[3] == lr


@pytest.fixture(scope="module")
def nlp_expected():
    return on_ranks(nlp_example, 1, None)[0]


def gathered_objects():
    """Strings of the last batch, which the first samples fill up, and lists of different lengths."""
    accelerator = fresh_accelerator(PP2)
    evaluation = accelerator.prepare(DataLoader([f"text {index}" for index in range(13)], batch_size=2))
    strings = [each for batch in evaluation for each in accelerator.gather_for_metrics(batch)]
    ragged = [
        each
        for batch in evaluation
        for each in accelerator.gather_for_metrics([torch.ones(1 + int(text[5:])) for text in batch], True)
    ]
    return strings, [len(each) for each in ragged]


def test_objects_are_gathered_once_for_each_sample():
    for ranks in (2, 4):
        for strings, lengths in on_ranks(gathered_objects, ranks):
            assert strings == [f"text {index}" for index in range(13)]
            assert lengths == list(range(1, 14))


# One by one


def exchange(smp, *, prepared=False):
    accelerator = fresh_accelerator(smp)
    if prepared:
        accelerator.prepare(toy())
    number, rank = accelerator.process_index, accelerator.state.process_index
    nested = {"pair": (torch.tensor([number, 10 + rank]), [torch.full((1, 2), float(number))])}
    found = accelerator.gather(nested)
    return {
        "processes": (accelerator.num_processes, number, accelerator.is_main_process, accelerator.is_last_process),
        "nested": [found["pair"][0].tolist(), found["pair"][1][0].tolist()],
        "scalar": accelerator.gather(torch.tensor(number)).tolist(),
        "bool": accelerator.gather(torch.tensor([number == 0])).tolist(),
        "half": accelerator.gather(torch.tensor([number], dtype=torch.bfloat16)).tolist(),
        "sum": accelerator.reduce(torch.tensor([1 + number, 2])).tolist(),
        "mean": float(accelerator.reduce({"x": torch.tensor(float(number))}, "mean")["x"]),
        "max": int(accelerator.reduce(torch.tensor(number), "max")),
        "none": int(accelerator.reduce(torch.tensor(rank), "none")),
        "padded": accelerator.pad_across_processes(torch.ones(1 + number), pad_index=5).tolist(),
        # What only the main process knows, all get to know.
        "decision": int(accelerator.reduce(torch.tensor(int(accelerator.is_main_process)))),
    }


def assert_exchanged(found, data_ranks):
    """``data_ranks``: for each of them the ranks that are it."""
    count = len(data_ranks)
    firsts = [ranks[0] for ranks in data_ranks]
    for number, ranks in enumerate(data_ranks):
        for rank in ranks:
            assert found[rank] == {
                "processes": (count, number, rank == 0, rank == len(found) - 1),
                "nested": [
                    [value for each in range(count) for value in (each, 10 + firsts[each])],
                    [[float(each)] * 2 for each in range(count)],
                ],
                # One process gives back what it was given.
                "scalar": list(range(count)) if count > 1 else 0,
                "bool": [each == 0 for each in range(count)],
                "half": [float(each) for each in range(count)],
                "sum": [count * (count + 1) // 2, 2 * count],
                "mean": (count - 1) / 2,
                "max": count - 1,
                "none": rank,
                "padded": [1.0] * (1 + number) + [5.0] * (count - 1 - number),
                "decision": 1,
            }


def test_values_are_exchanged_between_replicas():
    assert_exchanged(on_ranks(exchange, 2, PP2), [[0, 1]])
    assert_exchanged(on_ranks(exchange, 4, PP2), [[0, 1], [2, 3]])
    assert_exchanged(on_ranks(functools.partial(exchange, prepared=True), 4, PP2), [[0, 1], [2, 3]])


def test_the_order_is_that_of_the_samples_wherever_ranks_stand():
    assert_exchanged(on_ranks(exchange, 4, {**PP2, "placement_strategy": "spread"}), [[0, 2], [1, 3]])
    own = {**TP2, "prescaled_batch": False, "placement_strategy": "spread"}
    assert_exchanged(on_ranks(exchange, 4, own), [[0], [2], [1], [3]])


def refused():
    return fresh_accelerator(PP2).reduce(torch.ones(1), "min")


def test_an_unknown_reduction_is_refused():
    with pytest.raises(RuntimeError, match="`reduction` must be one of sum, mean, max and none, but is 'min'"):
        on_ranks(refused, 2)


def mismatched():
    accelerator = fresh_accelerator(PP2)
    PartialState().debug = True
    return accelerator.gather(torch.ones(1 + accelerator.process_index))


def test_accelerates_debug_mode_compares_shapes():
    with pytest.raises(RuntimeError, match="Cannot apply desired operation due to shape mismatches"):
        on_ranks(mismatched, 4)


def divide():
    accelerator = fresh_accelerator(PP2)
    found = []
    for inputs, pads in (
        (["a", "b", "c"], False),
        (["a", "b", "c"], True),
        ({"x": [1, 2, 3], "y": torch.arange(3)}, False),
        (torch.arange(3), True),
    ):
        with accelerator.split_between_processes(inputs, apply_padding=pads) as mine:
            found.append(mine)
    found[2]["y"], found[3] = found[2]["y"].tolist(), found[3].tolist()
    return found


def test_inputs_are_divided_between_replicas():
    whole = [["a", "b", "c"], ["a", "b", "c"], {"x": [1, 2, 3], "y": [0, 1, 2]}, [0, 1, 2]]
    assert on_ranks(divide, 2) == [whole] * 2
    first = [["a", "b"], ["a", "b"], {"x": [1, 2], "y": [0, 1]}, [0, 1]]
    second = [["c"], ["c", "c"], {"x": [3], "y": [2]}, [2, 2]]
    assert on_ranks(divide, 4) == [first, first, second, second]


def who():
    accelerator = fresh_accelerator(PP2)
    ran = []
    accelerator.on_main_process(lambda: ran.append("main"))()
    accelerator.on_local_main_process(lambda: ran.append("local main"))()
    accelerator.on_last_process(lambda: ran.append("last"))()
    accelerator.on_process(lambda: ran.append("first"), process_index=0)()
    accelerator.on_process(process_index=1)(lambda: ran.append("second"))()
    with accelerator.main_process_first():
        pass
    accelerator.wait_for_everyone()
    return ran


def test_functions_run_once():
    assert on_ranks(who, 2) == [["main", "local main", "first", "second"], ["last"]]
    assert on_ranks(who, 4) == [["main", "local main", "first"], [], ["second"], ["last"]]


def trigger(rank):
    accelerator = fresh_accelerator(PP2)
    before = accelerator.check_trigger()
    if accelerator.state.process_index == rank:
        accelerator.set_trigger()
    return before, accelerator.check_trigger(), accelerator.check_trigger()


def test_a_trigger_reaches_all_ranks_from_any():
    for rank in (0, 1):
        assert on_ranks(trigger, 2, rank) == [(False, True, False)] * 2


def traced(folder):
    accelerator = fresh_accelerator(PP2, kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=folder)])
    with accelerator.profile():
        torch.ones(2) + 1
    return sorted(os.listdir(folder))


def test_each_rank_writes_a_profile_of_its_own(tmp_path):
    assert on_ranks(traced, 2, str(tmp_path))[0] == ["profile_0.json", "profile_1.json"]
