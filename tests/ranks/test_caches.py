"""Steps that call a model of Transformers twice, the second time with the cache of the first call."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks

from ..parity.models import VOCABULARY, gpt2

LENGTH = 8


def batch(*, is_padded: bool) -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    if is_padded:
        mask[::2, :2] = 0
    return {"tokens": tokens, "mask": mask}


def step(net: nn.Module, given: Any, known: int, *, with_cache: bool, gives_places: bool) -> Tensor:
    """Logits of the tokens after the ``known`` ones."""
    tokens, mask = given["tokens"], given["mask"]
    if not with_cache:
        return net(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, known:]
    first = net(input_ids=tokens[:, :known], attention_mask=mask[:, :known], use_cache=True)
    rest = net(
        input_ids=tokens[:, known:],
        attention_mask=mask,
        past_key_values=first.past_key_values,
        position_ids=torch.arange(known, LENGTH)[None] if gives_places else None,
        use_cache=True,
    )
    return rest.logits


def on_stages(with_cache: bool, is_padded: bool, known: int, gives_places: bool, gradients: bool = False) -> Tensor:
    torch.manual_seed(0)
    net = gpt2().eval()
    engine = Engine(SMPConfig(pipeline_parallel_degree=2, microbatches=2))
    engine.attach(net)

    def run(given: Any) -> Tensor:
        return step(net.model, given, known, with_cache=with_cache, gives_places=gives_places)

    with torch.set_grad_enabled(gradients):
        return torch.cat(list(engine.eval_step(run, batch(is_padded=is_padded)).outputs))


def assert_as_alone(results: list[Tensor], *, is_padded: bool, known: int) -> None:
    torch.manual_seed(0)
    net = gpt2().eval().model
    with torch.no_grad():
        expected = step(net, batch(is_padded=is_padded), known, with_cache=False, gives_places=False)
    for found in results:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_padded", [False, True])
def test_without_a_cache_there_are_the_numbers_of_one_process(is_padded):
    assert_as_alone(run_ranks(on_stages, 2, False, is_padded, 7, False), is_padded=is_padded, known=7)


@pytest.mark.parametrize("gives_places", [False, True])
@pytest.mark.parametrize(("is_padded", "known"), [(False, 7), (True, 7), (True, 5), (False, 5)])
def test_stages_know_the_length_of_a_cache(is_padded, known, gives_places):
    assert_as_alone(run_ranks(on_stages, 2, True, is_padded, known, gives_places), is_padded=is_padded, known=known)


def test_with_gradients_places_after_the_end_of_a_cache_are_refused():
    with pytest.raises(RuntimeError, match="UnsupportedError: A unit is called with other arguments on one stage"):
        run_ranks(on_stages, 2, True, False, 7, False, True)


@pytest.mark.parametrize(("is_padded", "known"), [(True, 7), (True, 5), (False, 5)])
def test_with_gradients_stages_that_take_different_paths_tell_the_likely_reason(is_padded, known):
    with pytest.raises(RuntimeError, match="A unit has got an object for the second time.*`use_cache=False`"):
        run_ranks(on_stages, 2, True, is_padded, known, True, True)
