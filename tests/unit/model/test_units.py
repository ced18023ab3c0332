"""Which modules become units."""

import pytest
import torch
from torch import nn

from smp_strategy.model.units import choose_units, unit


def names(root: nn.Module, num_stages: int = 1) -> list[str]:
    return [each.name for each in choose_units(root, num_stages)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


class GPT(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.position = nn.Parameter(torch.zeros(3, 4))
        self.dropout = nn.Dropout()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight


class Wrapped(nn.Module):
    """Like a LightningModule that holds a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def test_blocks_of_a_list_and_what_stands_beside_it_are_units():
    assert names(GPT()) == ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]


def test_the_outer_module_only_adds_its_name():
    assert names(Wrapped(GPT())) == [f"model.{name}" for name in names(GPT())]


def test_places_in_a_list_may_be_empty():
    model = GPT()
    model.blocks.append(None)
    assert names(model) == names(GPT())


def test_a_list_is_no_unit_but_what_is_in_it():
    model = GPT()
    model.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 2)])
    model.last = nn.ModuleDict({"only": Block()})
    model.scales = nn.ParameterList([nn.Parameter(torch.ones(1))])
    assert names(model) == [*names(GPT()), "heads.0", "heads.1", "last.only"]


def test_tied_modules_stay_two_units():
    assert names(GPT(tied=True)) == names(GPT())


def test_parameters_of_no_unit_belong_to_the_glue():
    model = GPT()
    owned = {id(p) for unit in choose_units(model) for p in unit.module.parameters()}
    assert [name for name, p in model.named_parameters() if id(p) not in owned] == ["position"]


@pytest.mark.parametrize("by_class", [False, True])
def test_a_module_around_a_marked_one_is_opened(by_class):
    class Encoder(nn.Sequential):
        pass

    model = nn.Module()
    model.net = nn.Sequential(Encoder(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), nn.Linear(2, 2))
    assert names(model) == ["net"]
    if not by_class:
        unit(model.net[0])
    assert [each.name for each in choose_units(model, 1, ["Encoder"] if by_class else [])] == ["net.0", "net.1"]


def test_a_module_that_is_registered_twice_is_one_unit():
    model = GPT()
    model.same_head = model.head
    assert names(model) == names(GPT())


def test_hugging_face_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=3, n_head=2))
    blocks = [f"transformer.h.{i}" for i in range(3)]
    assert names(model) == ["transformer.wte", "transformer.wpe", *blocks, "transformer.ln_f", "lm_head"]


def test_hugging_face_vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8, patch_size=4, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8
    )
    found = names(ViTForImageClassification(config), 4)
    assert len([name for name in found if ".layers." in name or ".layer." in name]) == 2
    assert found[0].startswith("vit.embeddings")
    assert found[-2:] == ["vit.layernorm", "classifier"]


def test_hugging_face_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    # The rotary table has constant buffers only: it is glue.
    assert names(LlamaForCausalLM(config)) == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.norm",
        "lm_head",
    ]


class Residual(nn.Module):
    def __init__(self, *, downsample: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)
        self.bn = nn.BatchNorm2d(2)
        self.downsample = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)) if downsample else None


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 2, 1)
        self.bn1 = nn.BatchNorm2d(2)
        self.layer1 = nn.Sequential(Residual(downsample=True), Residual(downsample=False))
        self.layer2 = nn.Sequential(Residual(downsample=True), Residual(downsample=False))
        self.fc = nn.Linear(2, 3)


def test_blocks_of_a_resnet_are_units_with_their_downsampling():
    expected = ["conv1", "bn1", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "fc"]
    assert names(ResNet()) == expected
    assert names(ResNet(), 7) == expected


def test_a_sequential_of_layers_is_opened_when_there_are_more_stages_than_units():
    mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert names(mlp, 2) == ["0", "2", "4"]
    assert names(Wrapped(mlp), 2) == ["model.0", "model.2", "model.4"]


def test_a_transformer_encoder_is_cut_between_its_layers():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    found = names(Wrapped(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)), 3)
    assert found == [f"model.layers.{i}" for i in range(3)]


def test_lists_inside_blocks_are_opened_only_when_stages_would_stay_empty():
    stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
    model = Wrapped(stages)
    assert names(model, 4) == ["model.0.0", "model.0.1", "model.1.0", "model.1.1"]


def test_a_module_without_parameters_is_glue():
    class Masked(GPT):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Module()
            self.mask.register_buffer("table", torch.ones(3, 3))
            self.relu = nn.ReLU()

    assert names(Masked()) == names(GPT())


def test_batch_statistics_make_a_unit_also_without_parameters():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4))
    assert names(model, 3) == ["0", "1", "2"]


def test_an_lstm_is_not_cut():
    assert names(Wrapped(nn.LSTM(4, 4, num_layers=2)), 2) == ["model"]


def test_a_model_without_parameters_has_no_units():
    assert names(nn.Sequential(nn.ReLU(), nn.Flatten())) == []


@pytest.mark.parametrize("model", [GPT, ResNet, lambda: GPT(tied=True)])
@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
def test_no_module_is_in_two_units(model, num_stages):
    modules = [id(part) for unit in choose_units(model(), num_stages) for part in unit.module.modules()]
    assert len(modules) == len(set(modules))


def test_a_module_that_another_unit_holds_as_well_stays_a_unit():
    class Head(nn.Module):
        def __init__(self, backbone: nn.Module) -> None:
            super().__init__()
            self.backbone = backbone
            self.out = nn.Linear(4, 2)

    root = nn.Module()
    root.backbone = nn.Linear(4, 4)
    root.head = Head(root.backbone)
    root.blocks = nn.ModuleList(Block() for _ in range(2))
    # The step may call it directly or through the head.
    assert names(root) == ["backbone", "head", "blocks.0", "blocks.1"]


def test_tensors_of_a_unit_are_its_parameters_and_buffers():
    (unit,) = choose_units(Wrapped(nn.LSTM(4, 4)), 1)
    assert len(unit.tensors) == 4
