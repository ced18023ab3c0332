"""sentence-transformers: its trainer, with losses over pairs of a batch, and its evaluators."""

import pytest
import torch
from datasets import Dataset
from program_checks import PP2, alone, assert_alike, on_ranks
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import (
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
    SequentialEvaluator,
)
from sentence_transformers.sentence_transformer.losses import CoSENTLoss, MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from texts import VOCABULARY, sentences, tokenizer
from transformers import BertConfig, BertModel


def save_start(folder):
    torch.manual_seed(1)
    config = BertConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2},
        **{"intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    )
    BertModel(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def evaluator():
    """Evaluators, of which each embeds texts in batches of its own; ranks share the texts (13, 11 and 5 of them)."""
    found = sentences(24)
    queries, corpus = ({str(number): text for number, text in enumerate(each)} for each in (found[:5], found[5:16]))
    relevant = {query: {str(int(query) * 2)} for query in queries}
    return SequentialEvaluator(
        [
            EmbeddingSimilarityEvaluator(found[:13], found[11:24], [n % 5 / 5 for n in range(13)], batch_size=4),
            InformationRetrievalEvaluator(queries, corpus, relevant, batch_size=4, show_progress_bar=False),
        ]
    )


def train(folder, loss, smp=None, *, evaluates=False, learning_rate=0.05, **options):
    if smp is not None:
        from smp_strategy import SMPPlugin

        options["parallelism_config"] = SMPPlugin(**smp)
    words = Transformer(str(folder / "start"))
    model = SentenceTransformer(modules=[words, Pooling(words.get_word_embedding_dimension(), "mean")], device="cpu")
    found = sentences(32)
    columns = {"anchor": sentences(16, 4), "positive": found[:16]}
    if loss is CoSENTLoss:
        columns["score"] = [number / 16 for number in range(16)]
    args = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "run"),
        **{"use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 3, "save_strategy": "no"},
        **{"per_device_train_batch_size": 8, "num_train_epochs": 2, "logging_steps": 1, "learning_rate": learning_rate},
        **{"optim": "sgd", "lr_scheduler_type": "constant", "dataloader_pin_memory": False},
        eval_strategy="epoch" if evaluates else "no",
        **options,
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_dict(columns),
        loss=loss(model),
        evaluator=evaluator() if evaluates else None,
    )
    trainer.train()
    history = trainer.state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    kinds = ("pearson", "spearman", "ndcg", "map", "mrr")
    losses += [{k: v for k, v in entry.items() if any(kind in k for kind in kinds)} for entry in history]
    if smp is None:
        return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}
    return losses, trainer.accelerator.get_state_dict(trainer.model)


@pytest.mark.parametrize("loss", [MultipleNegativesRankingLoss, CoSENTLoss])
def test_it_trains_as_in_one_process(loss, tmp_path):
    save_start(tmp_path / "start")
    expected = alone(train, tmp_path, loss)
    for found in on_ranks(train, 2, tmp_path, loss, PP2):
        assert_alike(found, expected)


@pytest.mark.parametrize("smp", [PP2, {"sharded_data_parallel_degree": 2}], ids=["pp2", "sdp2"])
def test_its_evaluators_see_the_embeddings_of_one_process(smp, tmp_path):
    save_start(tmp_path / "start")
    expected = alone(train, tmp_path, CoSENTLoss, evaluates=True, learning_rate=0.0)[0]
    for found in on_ranks(train, 2, tmp_path, CoSENTLoss, smp, evaluates=True, learning_rate=0.0):
        measured = [[each for each in entries if isinstance(each, dict) and each] for entries in (found[0], expected)]
        assert len(measured[1]) == 2
        assert_alike(*measured)
