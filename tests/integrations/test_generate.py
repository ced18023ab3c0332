"""Text that `generate` makes with a key/value cache, in Accelerate and in validation steps of Lightning."""

import pytest
import torch
from accelerate_checks import fresh_accelerator, on_ranks
from lightning.pytorch import LightningModule
from lightning_toy import toy_trainer
from torch.utils.data import DataLoader
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

VOCABULARY = 32
TEXT = torch.arange(4, 28).reshape(4, 6)
MASK = torch.ones_like(TEXT)
MASK[0, 4:] = MASK[1, 3:] = 0
PADDED = {"input_ids": TEXT, "attention_mask": MASK}
WAYS = {"greedy": {}, "beams": {"num_beams": 2, "num_return_sequences": 2}}
PP1, PP2 = {"pipeline_parallel_degree": 1}, {"pipeline_parallel_degree": 2, "microbatches": 2}
LAYOUTS = {
    "pp2": PP2,
    "tp2": {**PP1, "tensor_parallel_degree": 2},
    "sdp2": {**PP1, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0},
    "replicas": PP1,
}


def t5():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    options = {"decoder_start_token_id": 0, "initializer_factor": 8.0, "tie_word_embeddings": False}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes, **options))


def bart():
    torch.manual_seed(0)
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 16, "max_position_embeddings": 64}
    tokens = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3}
    net = BartForConditionalGeneration(BartConfig(vocab_size=VOCABULARY, dropout=0.0, init_std=0.2, **sizes, **tokens))
    net.generation_config.forced_eos_token_id = None
    return net


MODELS = {"t5": t5, "bart": bart}


def generated(net, way):
    return net.generate(**PADDED, **WAYS[way], max_new_tokens=4, do_sample=False, use_cache=True)


def in_one_process(model, way):
    expected = generated(MODELS[model]().eval(), way)
    assert len(expected.unique(dim=0)) > 1  # else a wrong cache or mask would not show
    return expected


def with_accelerate(model, way, smp):
    net = MODELS[model]()
    accelerator = fresh_accelerator(smp)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
    accelerator.backward(net(input_ids=TEXT, labels=TEXT).loss)
    optimizer.step()
    return generated(net.eval(), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_accelerate_generates_the_tokens_of_one_process(model, layout, way):
    expected = in_one_process(model, way)
    for found in on_ranks(with_accelerate, 2, model, way, LAYOUTS[layout]):
        assert torch.equal(found, expected)


class Writes(LightningModule):
    def __init__(self, model, way):
        super().__init__()
        self.net, self.way, self.written = MODELS[model](), way, []

    def training_step(self, batch):
        return self.net(input_ids=batch, labels=batch).loss

    def validation_step(self, batch):
        self.written.append(generated(self.net, self.way).tolist())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self):
        return DataLoader(TEXT, batch_size=4)

    def val_dataloader(self):
        return DataLoader(TEXT, batch_size=4)


def with_lightning(folder, model, smp):
    module = Writes(model, "greedy")
    toy_trainer(folder, smp=smp, max_epochs=1, num_sanity_val_steps=0).fit(module)
    return module.written[-1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_a_validation_step_of_lightning_generates_the_tokens_of_one_process(model, layout, tmp_path):
    expected = in_one_process(model, "greedy")
    for found in on_ranks(with_lightning, 2, tmp_path, model, LAYOUTS[layout]):
        assert found == expected.tolist()
