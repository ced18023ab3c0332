"""Partitions by hand and from files, from a LightningModule to identical weights."""

import json

import pytest
import torch
from lightning_toy import on_ranks, quiet, toy_trainer
from torch.utils.data import DataLoader

from gpt import GPT, Block
from gpt import LanguageModel as ByteModel
from optimization import Recipe
from smp_strategy import ConfigError, SMPError, partition, plan_partition, set_partition

STEPS, BATCH, MICROBATCHES = 3, 8, 4
LAYERS = 4


def windows():
    return torch.randint(256, (STEPS * BATCH, 9), generator=torch.Generator().manual_seed(0))


def recipe():
    return Recipe(lr=1e-2, warmup_steps=2, weight_decay=0.1)


def gpt(*, layers=LAYERS, width=16, tied=False):
    torch.manual_seed(0)
    return GPT(context=8, layers=layers, heads=2, width=width, tied=tied)


def byte_model():
    return ByteModel(gpt(), recipe())


# --- ways to place a model by hand ----------------------------------------------------------------------------------


def contiguous(pp):
    """Halves or quarters; what stands before the blocks is on the first stage, what stands behind on the last."""
    module = byte_model()
    set_partition(module.model, 0)
    for number, block in enumerate(module.model.blocks):
        set_partition(block, number * pp // LAYERS)
    set_partition(module.model.head, pp - 1)
    return module


def round_robin(pp):
    module = byte_model()
    for number, block in enumerate(module.model.blocks):
        set_partition(block, number % pp)
    return module


def backwards(pp):
    module = byte_model()
    for number, block in enumerate(module.model.blocks):
        set_partition(block, (LAYERS - 1 - number) % pp)
    set_partition(module.model.tokens, pp - 1)
    return module


def inside_of_blocks(pp):
    """Attention on one stage and the rest of the block on another: the block itself runs everywhere."""
    module = contiguous(pp)
    for number, block in enumerate(module.model.blocks):
        set_partition(block.attention, (number + 1) % pp)
    return module


class WithSGD(Recipe):
    def build(self, module):
        return torch.optim.SGD(module.parameters(), lr=0.05)


def tied(pp):
    """The embedding and the head are on one stage, but other stages work in between."""
    module = ByteModel(gpt(tied=True), WithSGD(lr=0.05, warmup_steps=0, weight_decay=0.0))
    for number, block in enumerate(module.model.blocks):
        set_partition(block, number % pp)
    return module


class MadeLate(ByteModel):
    """Its blocks exist only when Lightning asks for them, inside of a context each."""

    def __init__(self, pp):
        torch.manual_seed(0)
        super().__init__(
            GPT(context=8, layers=LAYERS, heads=2, width=16), Recipe(lr=1e-2, warmup_steps=2, weight_decay=0.1)
        )
        self.pp = pp
        self.blocks = self.model.blocks
        self.model.blocks = None

    def configure_model(self):
        if self.model.blocks is None:
            initial, blocks = self.blocks, torch.nn.ModuleList()
            for number in range(LAYERS):
                with partition((number + 1) % self.pp):
                    block = Block(16, 2)
                block.load_state_dict(initial[number].state_dict())
                blocks.append(block)
            del self.blocks
            self.model.blocks = blocks


WAYS = {way.__name__: way for way in (contiguous, round_robin, backwards, inside_of_blocks, MadeLate)}


# --- training -------------------------------------------------------------------------------------------------------


def train(folder, make, pp, **options):
    """Weights after a few steps, and the stage of every unit."""
    module = make(pp)
    if options.pop("plain", False):
        smp, batch_size, extra = None, BATCH // MICROBATCHES, {"accumulate_grad_batches": MICROBATCHES}
    else:
        smp = {"pipeline_parallel_degree": pp, "microbatches": MICROBATCHES, **options}
        batch_size, extra = BATCH, {}
    trainer = toy_trainer(folder, smp=smp, max_steps=STEPS, max_epochs=-1, **extra)
    trainer.fit(module, DataLoader(windows(), batch_size=batch_size))
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return weights, None if smp is None else trainer.strategy.engine.partition.stage_of


def by_hand(folder, make, pp, **options):
    return train(folder, make, pp, auto_partition=False, default_partition=0, **options)


def assert_identical(found, expected):
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("way", "pp"), [*((way, 2) for way in WAYS), ("backwards", 4), ("inside_of_blocks", 4)])
def test_a_model_that_is_placed_by_hand_trains_to_the_weights_of_one_process(way, pp, tmp_path):
    with quiet():
        expected, _ = train(tmp_path, WAYS[way], pp, plain=True)
    for found, stage_of in on_ranks(by_hand, pp, tmp_path, WAYS[way], pp):
        assert_identical(found, expected)
        assert set(stage_of.values()) == set(range(pp))


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("contiguous", {"tokens": 0, "positions": 0, "norm": 0, "head": 1, "blocks.1": 0, "blocks.2": 1}),
        ("round_robin", {"tokens": 0, "norm": 0, "head": 0, "blocks.1": 1, "blocks.2": 0}),
        ("inside_of_blocks", {"blocks.0.norm1": 0, "blocks.0.attention": 1, "blocks.0.mlp": 0}),
        ("MadeLate", {"blocks.0": 1, "blocks.1": 0, "blocks.3": 0, "head": 0}),
    ],
)
def test_units_are_where_they_were_placed(way, expected, tmp_path):
    _, stage_of = on_ranks(by_hand, 2, tmp_path, WAYS[way], 2)[0]
    assert expected.items() <= {name.removeprefix("model."): stage for name, stage in stage_of.items()}.items()


def test_tied_weights_that_are_placed_by_hand_stay_within_the_stated_bound(tmp_path):
    with quiet():
        expected, _ = train(tmp_path, tied, 2, plain=True)
    for found, _ in on_ranks(by_hand, 2, tmp_path, tied, 2):
        for name, value in expected.items():
            assert (found[name] - value).norm() <= 1e-6 * value.norm(), name


# --- what is refused before the first step --------------------------------------------------------------------------


def refusal(folder, make, pp, **options):
    steps = []

    def counted(pp):
        module = make(pp)
        module.on_train_batch_start = lambda *arguments: steps.append(arguments)
        return module

    try:
        train(folder, counted, pp, **options)
    except ConfigError as error:
        assert not steps
        return str(error)
    return "not refused"


def plain_model(pp):
    return byte_model()


def wrong_stage(pp):
    return contiguous(pp + 1)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (round_robin, {}, "`model.blocks.0`, `model.blocks.1`, `model.blocks.2` and 1 more are placed by hand, but"),
        (
            round_robin,
            {"auto_partition": False},
            "has placed `model.tokens`, `model.positions`, `model.norm` and",
        ),
        (plain_model, {"auto_partition": False, "default_partition": 1}, "No unit is on stage 0. Place one of"),
        (wrong_stage, {"auto_partition": False}, "`model.blocks.3`, `model.head` are placed on stage 2, but with 2"),
        (plain_model, {"partition_file": "/proc/no/p.json"}, "`partition_file` (/proc/no/p.json) cannot be written: "),
        (
            plain_model,
            {"pipeline": "1f1b", "virtual_pipeline_degree": 10**6},
            "`pipeline_parallel_degree` (2) times `virtual_pipeline_degree` (1000000) must not be larger than",
        ),
    ],
)
def test_what_cannot_be_placed_is_refused_before_the_first_step(make, options, message, tmp_path):
    def body(folder):
        return refusal(folder, make, 2, **options)

    for found in on_ranks(body, 2, tmp_path):
        assert message in found


def changes_its_mind(folder):
    """Run, place a block elsewhere, and run again with the same strategy."""
    module = contiguous(2)
    smp = {"pipeline_parallel_degree": 2, "microbatches": 4, "auto_partition": False}
    trainer = toy_trainer(folder, smp=smp)
    found = []
    for stage in (0, 1):
        set_partition(module.model.blocks[1], stage)
        trainer.validate(module, DataLoader(windows(), batch_size=BATCH), verbose=False)
        found.append(trainer.strategy.engine.partition.stage_of["model.blocks.1"])
    return found


def test_a_module_may_be_placed_anew_between_two_runs(tmp_path):
    assert on_ranks(changes_its_mind, 2, tmp_path) == [[0, 1], [0, 1]]


# --- files ----------------------------------------------------------------------------------------------------------


def saved_partition(folder):
    """A run that writes its partition; the file and its contents."""
    path = folder / "partition.json"
    found = on_ranks(train_with, 2, folder, plain_model, {"partition_file": str(path)})
    return path, json.loads(path.read_text()), found[0]


def train_with(folder, make, options):
    return train(folder, make, 2, **options)


def load(path):
    return {"partition_file": str(path), "load_partition": True}


def test_a_saved_partition_gives_the_same_placement_in_another_run(tmp_path):
    path, _, (weights, stage_of) = saved_partition(tmp_path)
    before = path.read_bytes()
    for found, loaded in on_ranks(train_with, 2, tmp_path, plain_model, load(path)):
        assert loaded == stage_of
        assert_identical(found, weights)
    assert path.read_bytes() == before


@pytest.mark.parametrize("schedule", [{"pipeline": "1f1b", "virtual_pipeline_degree": 2}, {"pipeline": "zb-v"}])
def test_a_saved_partition_with_several_chunks_per_stage_is_loaded_under_its_schedule(schedule, tmp_path):
    path = tmp_path / "partition.json"
    options = {**schedule, "partition_file": str(path)}
    [(weights, stage_of), _] = on_ranks(train_with, 2, tmp_path, plain_model, options)
    for found, loaded in on_ranks(train_with, 2, tmp_path, plain_model, {**options, "load_partition": True}):
        assert loaded == stage_of
        assert_identical(found, weights)

    def body(folder):
        return refusal(folder, plain_model, 2, **load(path))

    for message in on_ranks(body, 2, tmp_path):
        assert "It has 2 chunks per stage, but the schedule is for 1. Set `virtual_pipeline_degree=2`" in message


def test_a_unit_is_moved_by_editing_the_file(tmp_path):
    path, data, (weights, stage_of) = saved_partition(tmp_path)
    for unit in data["units"]:
        if unit["name"] == "model.blocks.0":
            unit["stage"] = 1 - unit["stage"]
    path.write_text(json.dumps(data))
    moved = {**stage_of, "model.blocks.0": 1 - stage_of["model.blocks.0"]}
    for found, loaded in on_ranks(train_with, 2, tmp_path, plain_model, load(path)):
        assert loaded == moved
        assert_identical(found, weights)


def larger(pp):
    return ByteModel(gpt(width=32), recipe())


def deeper(pp):
    return ByteModel(gpt(layers=LAYERS + 1), recipe())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (larger, "does not fit. Unit 0 of the file, `model.tokens`, has 4096 parameters there, but 8192"),
        (deeper, "does not fit. Unit 6 of this model is `model.blocks.4`, which is not in the file."),
        (
            round_robin,
            "`model.blocks.1` is on stage 0 in {path}, but is placed on stage 1 by hand. Change",
        ),
    ],
)
def test_a_partition_of_another_model_is_refused_before_the_first_step(make, message, tmp_path):
    path, *_ = saved_partition(tmp_path)

    def body(folder):
        return refusal(folder, make, 2, **load(path))

    for found in on_ranks(body, 2, tmp_path):
        assert message.format(path=path) in found


def test_a_file_that_is_not_there_is_told_on_every_rank(tmp_path):
    def body(folder):
        return refusal(folder, plain_model, 2, **load(folder / "none.json"))

    for found in on_ranks(body, 2, tmp_path):
        assert "`partition_file` cannot be read: [Errno 2]" in found
        assert "none.json" in found


def test_a_partition_made_by_hand_can_be_loaded(tmp_path):
    path = tmp_path / "partition.json"
    options = {"auto_partition": False, "default_partition": 0, "partition_file": str(path)}
    [(weights, stage_of), _] = on_ranks(train_with, 2, tmp_path, inside_of_blocks, options)
    for found, loaded in on_ranks(train_with, 2, tmp_path, inside_of_blocks, load(path)):
        assert loaded == stage_of
        assert_identical(found, weights)


def planned(make, **options):
    """What :func:`plan_partition` says without any ranks."""

    def step(batch):
        logits = module.model(batch[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    module = make(2)
    return plan_partition(module, step, windows()[:2], num_stages=2, microbatches=4, **options)


def test_what_is_placed_by_hand_or_in_a_file_is_planned_ahead(tmp_path):
    by_hand = planned(inside_of_blocks, auto_partition=False)
    assert by_hand.stage_of["model.blocks.0.attention"] == 1
    by_hand.save(tmp_path / "partition.json")
    loaded = planned(inside_of_blocks, **load(tmp_path / "partition.json"))
    assert loaded == by_hand
    assert planned(plain_model).step_seconds < by_hand.step_seconds
    with pytest.raises(ConfigError, match="`model` is placed by hand, but `auto_partition` is True"):
        planned(inside_of_blocks)


def saves(folder):
    trainer = toy_trainer(folder, smp={"pipeline_parallel_degree": 2, "microbatches": 4}, max_steps=1, max_epochs=-1)
    module = byte_model()
    early = []

    def too_early():
        try:
            trainer.strategy.save_partition(folder / "early.json")
        except SMPError as error:
            early.append(str(error))

    module.on_train_start = too_early
    trainer.fit(module, DataLoader(windows(), batch_size=BATCH))
    trainer.strategy.save_partition(folder / "saved.json")
    return early, trainer.strategy.engine.partition.stage_of


def test_the_strategy_saves_its_partition_on_rank_0(tmp_path):
    found = on_ranks(saves, 2, tmp_path)
    for early, _ in found:
        assert early == ["The partition is decided in the first step, but is asked for before. Ask after it."]
    units = json.loads((tmp_path / "saved.json").read_text())["units"]
    assert {unit["name"]: unit["stage"] for unit in units} == found[0][1]
    assert not (tmp_path / "early.json").exists()


def explains(folder):
    trainer = toy_trainer(folder, smp={"pipeline_parallel_degree": 2, "microbatches": 4}, max_steps=2, max_epochs=-1)
    module = byte_model()

    def too_early():
        with pytest.raises(SMPError, match="before the first step"):
            trainer.strategy.explain()

    module.on_train_start = too_early
    trainer.fit(module, DataLoader(windows(), batch_size=BATCH))
    explanation = trainer.strategy.explain()
    return str(explanation), explanation.to_html(), trainer.strategy.engine.partition


def test_the_decision_is_explained_alike_on_every_rank(tmp_path):
    (text, page, partition), other = on_ranks(explains, 2, tmp_path)
    assert (text, page, partition) == other
    assert f"{len(partition.units)} units on 2 stages, schedule interleaved with 4 microbatches" in text
    assert all(unit.name.split(".")[-1] in text for unit in partition.units)
    assert "stage 1   F0 B0 F1 B1" in text
