"""A tokenizer, sentences and tiny language models for programs that train on text."""

import pydoc_data.topics

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import WordLevelTrainer
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast

__all__ = ["language_model", "reward_model", "sentences", "tokenizer"]

VOCABULARY = 200


def sentences(count, words=8):
    """Pieces of Python's own documentation, of various lengths."""
    text = " ".join(pydoc_data.topics.topics["assert"].split()) * 20
    found = text.split()
    return [" ".join(found[3 * i : 3 * i + words + i % 4]) for i in range(count)]


def tokenizer():
    """Words, with a template for chats."""
    words = Tokenizer(WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    special = ["[PAD]", "[UNK]", "[EOS]"]
    words.train_from_iterator(sentences(60), WordLevelTrainer(vocab_size=VOCABULARY, special_tokens=special))
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        **{"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[EOS]", "bos_token": "[EOS]"},
        chat_template="{% for m in messages %}{{ m['content'] }} [EOS] {% endfor %}",
    )


def _config(**options):
    return GPT2Config(
        **{"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 16, "n_layer": 3, "n_head": 2},
        **{"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 2, "tie_word_embeddings": False},
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **options,
    )


def language_model():
    """A GPT-2."""
    torch.manual_seed(1)
    return GPT2LMHeadModel(_config())


def reward_model():
    """A GPT-2 with a score."""
    torch.manual_seed(1)
    return GPT2ForSequenceClassification(_config(num_labels=1))
