"""The examples: the data they read, the pictures they draw, and whole runs of ``examples/train.py``."""

import ast
import os
from pathlib import Path

import pytest
import torch

from corpus import bounded, modules, read_folder, split, standard_library
from gpt import GPT
from optimization import Recipe
from plot import plot_losses, read_curve
from sampling import sample
from text import TextData
from vision import DigitsData

ROOT = Path(__file__).parents[2]
# Scripts for SageMaker's library say what runs in parallel: that is its interface.
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if not path.name.startswith("sagemaker_")]

# --- text -----------------------------------------------------------------------------------------------------------


def text_data(path, **options):
    defaults = {"context": 16, "batch_size": 4, "train_windows": 12, "val_windows": 8, "max_bytes": 100_000, "seed": 0}
    data = TextData(path=str(path), **{**defaults, **options})
    data.setup("fit")
    return data


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_bytes(b"y" * 1000)
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 10)
    (tmp_path / ".hidden").write_bytes(b"no")
    return tmp_path


def test_the_standard_library_is_megabytes_of_text_with_its_reference_first():
    documents = list(bounded(standard_library(), 4_000_000))
    assert sum(map(len, documents)) == 4_000_000
    assert b"The standard type hierarchy" in documents[0]


def test_a_folder_is_read_in_the_order_of_names_without_hidden_files(corpus):
    assert [document[:2] for document in read_folder(corpus)] == [b"\x00\x01", b"yy"]


def test_modules_come_by_their_names_and_folders_that_are_skipped_are_not_looked_into(tmp_path, monkeypatch):
    for name in ("b.py", "a/c.py", "a.py", "test/d.py", "a/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    looked_into, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: looked_into.append(folder) or scandir(folder))
    assert list(modules(str(tmp_path))) == [tmp_path / name for name in ("a/c.py", "a.py", "b.py")]
    assert looked_into == [str(tmp_path), str(tmp_path / "a")]


def test_a_path_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="`data.path=.*nowhere` is neither a file nor a folder"):
        text_data(tmp_path / "nowhere")


def test_a_text_shorter_than_a_window_is_refused(tmp_path):
    (tmp_path / "short.txt").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="leaves 10 bytes on one side of the split, but a window needs 17"):
        text_data(tmp_path / "short.txt")


def test_the_last_tenth_of_every_document_is_held_out():
    train, held_out = split([b"a" * 10, b"b" * 20])
    assert bytes(train.tolist()) == b"a" * 9 + b"b" * 18
    assert bytes(held_out.tolist()) == b"abb"


def test_reading_stops_at_the_limit_in_the_middle_of_a_document():
    assert list(bounded(iter([b"abc", b"def", b"ghi"]), 5)) == [b"abc", b"de"]


def test_every_process_draws_the_same_windows(corpus):
    first, second = (list(text_data(corpus).train_dataloader()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert [tuple(batch.shape) for batch in first] == [(4, 17)] * 3


def test_another_seed_and_another_epoch_draw_other_windows(corpus):
    class Trainer:
        current_epoch = 1

    def windows(data):
        return torch.cat(list(data.train_dataloader()))

    later = text_data(corpus)
    later.trainer = Trainer()
    assert not torch.equal(windows(text_data(corpus)), windows(text_data(corpus, seed=1)))
    assert not torch.equal(windows(text_data(corpus)), windows(later))


def test_smaller_batches_cut_the_same_order(corpus):
    whole = torch.cat(list(text_data(corpus, batch_size=4).train_dataloader()))
    pieces = torch.cat(list(text_data(corpus, batch_size=1).train_dataloader()))
    assert torch.equal(whole, pieces)


def test_validation_windows_span_the_held_out_text(corpus):
    data = text_data(corpus)
    windows = torch.cat(list(data.val_dataloader()))
    assert torch.equal(windows[0], data.val_text[:17].long())
    assert torch.equal(windows[-1], data.val_text[-17:].long())


# --- digits ---------------------------------------------------------------------------------------------------------


def test_digits_are_split_without_overlap_and_scaled():
    data = DigitsData(batch_size=16, seed=3)
    data.setup("fit")
    images, labels = data.train.tensors
    assert images.shape == (1536, 1, 8, 8)
    assert (images.min(), images.max()) == (-1, 1)
    assert set(labels.tolist()) == set(range(10))
    assert len(data.val) == 256
    again = DigitsData(batch_size=16, seed=3)
    again.setup("fit")
    assert torch.equal(again.val.tensors[0], data.val.tensors[0])


# --- models and tools -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_no_example_module_knows_that_it_is_run_in_parallel(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert imported
    assert not [name for name in imported if name.startswith(("smp_strategy", "torch.distributed"))]


def test_a_tied_gpt_has_one_matrix_less():
    sizes = {"context": 8, "layers": 1, "heads": 2, "width": 16}
    untied, tied = (sum(p.numel() for p in GPT(tied=tied, **sizes).parameters()) for tied in (False, True))
    assert untied - tied == 256 * 16


def test_a_gpt_does_not_look_ahead():
    torch.manual_seed(0)
    model = GPT(context=8, layers=2, heads=2, width=16)
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5:] = 77
    assert torch.equal(model(tokens)[:, :5], model(changed)[:, :5])
    assert not torch.equal(model(tokens)[:, 5:], model(changed)[:, 5:])


def test_the_learning_rate_rises_to_its_peak_and_falls_to_a_tenth():
    recipe = Recipe(lr=1.0, warmup_steps=4, weight_decay=0.0)
    factors = [recipe.factor(step, 10) for step in range(11)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[-1] == pytest.approx(0.1)


def test_samples_repeat_under_a_seed_and_show_any_byte():
    def uniform(tokens):
        return torch.zeros(*tokens.shape, 256)

    first, second = (sample(uniform, prompt=b"ab", length=20, context=4, seed=1) for _ in range(2))
    assert first == second
    assert first.startswith("ab")


def test_the_picture_is_drawn_from_the_metrics(tmp_path):
    metrics = tmp_path / "metrics.csv"
    metrics.write_text("step,train_loss,val_loss\n0,,5.5\n4,4.5,\n9,4.0,\n9,,4.1\n")
    assert read_curve(metrics, "val_loss") == [(0, 5.5), (9, 4.1)]
    plot_losses(metrics, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
