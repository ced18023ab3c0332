"""Ranks, groups and messages under SageMaker's names; ``smp.init`` and the variables of SageMaker's containers."""

import json

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from smp_checks import LAYOUTS, adamw, assert_same, batches, begin, mine, net, on_ranks, train_step

import smp_strategy.smp as smp
from smp_strategy import ConfigError, SMPError

KINDS = ("pp", "tp", "rdp", "dp", "mp")


def places(parameters):
    smp.init(parameters)
    assert smp.rank() == dist.get_rank()
    assert smp.size() == smp.mp_size() * smp.rdp_size() == smp.pp_size() * smp.dp_size()
    assert smp.dp_size() == smp.tp_size() * smp.rdp_size()
    for kind in KINDS:
        members = getattr(smp, f"get_{kind}_group")()
        group = getattr(smp, f"get_{kind}_process_group")()
        assert dist.get_process_group_ranks(group) == members
        assert members[getattr(smp, f"{kind}_rank")()] == smp.rank()
        assert len(members) == getattr(smp, f"{kind}_size")()
        assert smp.allgather(smp.rank(), smp.CommGroup[f"{kind.upper()}_GROUP"]) == members
        smp.barrier(smp.CommGroup[f"{kind.upper()}_GROUP"])
    smp.barrier()
    smp.dp_barrier()
    smp.mp_barrier()
    assert dist.get_process_group_ranks(smp.get_world_process_group()) == list(range(smp.size()))
    assert (smp.local_rank(), smp.local_size()) == (smp.rank(), smp.size())
    return {kind: getattr(smp, f"get_{kind}_group")() for kind in KINDS}


def test_groups_are_those_of_sagemakers_placement():
    # SageMaker's tables for 8 ranks and two stages.
    cluster = on_ranks(places, 8, {"partitions": 2})
    assert [each["mp"] for each in cluster] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]
    assert cluster[0]["dp"] == [0, 2, 4, 6]
    assert cluster[1]["dp"] == [1, 3, 5, 7]
    spread = on_ranks(places, 8, {"partitions": 2, "placement_strategy": "spread"})
    assert [spread[rank]["mp"] for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert spread[4]["dp"] == [4, 5, 6, 7]
    three = on_ranks(places, 8, {"partitions": 2, "tensor_parallel_degree": 2, "ddp": True})
    assert three[0] == {"pp": [0, 2], "tp": [0, 1], "rdp": [0, 4], "dp": [0, 1, 4, 5], "mp": [0, 1, 2, 3]}


def messages():
    smp.init({"partitions": 2})
    word = {"from": smp.rank()}
    if smp.pp_rank() == 0:
        smp.send(word, 1, smp.RankType.PP_RANK)
        assert smp.recv_from(1, smp.PP_RANK) == {"from": smp.rank() + 1}
        smp.broadcast("all", smp.CommGroup.PP_GROUP)
    else:
        assert smp.recv_from(0, smp.PP_RANK) == {"from": smp.rank() - 1}
        smp.send(word, 0, smp.PP_RANK)
        assert smp.recv_from(0, smp.PP_RANK) == "all"
    if smp.rank() == 3:
        smp.broadcast([1], smp.WORLD)
    else:
        assert smp.recv_from(3, smp.WORLD_RANK) == [1]
    with pytest.raises(ConfigError, match="There is no PP_RANK 2: the group has 2 ranks"):
        smp.send(1, 2, smp.PP_RANK)
    with pytest.raises(ConfigError, match="is this rank itself"):
        smp.send(1, smp.dp_rank(), smp.DP_RANK)
    with pytest.raises(ConfigError, match="It must be one of smp.WORLD_RANK"):
        smp.recv_from(0, smp.WORLD)


def test_objects_are_sent_between_ranks():
    on_ranks(messages, 4)


def initialised():
    with pytest.raises(SMPError, match=r"Call `smp.init\(\)` first"):
        smp.rank()
    assert not smp.is_initialized()
    smp.init()
    assert smp.is_initialized()
    assert not smp.is_tracing()
    assert smp.rdp_size() == 2
    smp.init({"microbatches": 2})  # the first call was that of another library, perhaps
    assert smp.state.cfg.microbatches == 2
    smp.init()
    assert smp.state.cfg.pipeline_parallel_degree == smp.state.cfg.partitions == 1
    assert smp.state.cfg.microbatches == 1
    assert not smp.state.cfg.ddp
    assert not smp.state.cfg.fp16
    assert smp.state.cfg.optimize == "memory"
    with pytest.raises(AttributeError, match="has no parameter `fp61`"):
        _ = smp.state.cfg.fp61
    assert smp.state.model is None
    smp.shutdown()
    model, optimizer = begin({"partitions": 2, "ddp": True})
    assert smp.state.cfg.ddp
    assert smp.state.model is model
    assert smp.state.optimizer is optimizer
    with pytest.raises(SMPError, match="was called before, and a model is wrapped"):
        smp.init()


def test_a_run_begins_with_init_and_ends_with_shutdown():
    on_ranks(initialised, 2)


def wrapped_again(first, second):
    model, optimizer = begin(first)
    inner = model.module
    train_step(model, *mine(batches()[0]))
    optimizer.step()
    smp.shutdown()
    with pytest.raises(SMPError, match=r"Call `smp.init\(\)` first"):
        train_step(model, *batches()[0])
    smp.init(second)
    model = smp.DistributedModel(inner)
    optimizer = smp.DistributedOptimizer(adamw(model.parameters()))
    optimizer.zero_grad()
    train_step(model, *mine(batches()[1]))
    optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(("first", "second"), [("pp2", "sdp2"), ("sdp2", "pp2"), ("replicas2", "tp2")])
def test_a_model_may_be_wrapped_again_under_another_layout(first, second):
    twin = net()
    for data, targets in batches(2):
        optimizer = adamw(twin.parameters())
        optimizer.zero_grad()
        F.cross_entropy(twin(data), targets).backward()
        optimizer.step()
    for found in on_ranks(wrapped_again, 2, LAYOUTS[first][1], LAYOUTS[second][1]):
        assert_same(found, twin.state_dict(), rtol=1e-5, atol=1e-6)


def launched(monkeypatch_environ, given):
    import os

    os.environ.update(monkeypatch_environ)
    smp.init(given)
    return smp.state.cfg.partitions, smp.state.cfg.microbatches


def test_the_launcher_wins_over_the_script_and_our_variables_over_both(tmp_path):
    variables = {"SM_HP_MP_PARAMETERS": json.dumps({"partitions": 2, "microbatches": 6})}
    given = {"pipeline_parallel_degree": 1, "microbatches": 3}
    assert on_ranks(launched, 2, {}, given) == [(1, 3)] * 2
    assert on_ranks(launched, 2, variables, given) == [(2, 6)] * 2
    assert on_ranks(launched, 2, variables | {"SMP_MICROBATCHES": "8"}, given) == [(2, 8)] * 2
    file = tmp_path / "parameters.json"
    file.write_text(json.dumps(given))
    assert on_ranks(launched, 2, {}, str(file)) == [(1, 3)] * 2
    assert on_ranks(launched, 2, {"SM_HP_MP_PARAMETERS": str(file)}, {"microbatches": 5}) == [(1, 3)] * 2


def backend_variables():
    import os

    os.environ.update(
        SMP_DISABLE_D2D="1",
        SMP_NCCL_THROTTLE_LIMIT="1",
        SMP_D2D_GPU_BUFFER_SIZE_BYTES="1",
        SMP_ENABLE_CROSS_NODE_D2D="0",
    )
    begin({"partitions": 2})


def test_variables_of_sagemakers_backend_are_accepted():
    on_ranks(backend_variables, 2)
