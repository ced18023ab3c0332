"""Process groups beside a default group that was made beforehand."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from smp_strategy.distributed.process_groups import carry_host_tensors, new_group, new_subgroup
from smp_strategy.testing import run_ranks

HOST = torch.device("cpu")


def sums_on_groups_beside_one_without_the_host() -> tuple[float, float, list[str]]:
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    dist.destroy_process_group()
    # Like "nccl" alone: the host's tensors have no backend.
    again = dist.PrefixStore("again", store)
    dist.init_process_group("cuda:gloo", store=again, rank=rank, world_size=4, timeout=timedelta(seconds=20))
    given = dist.group.WORLD
    with pytest.raises(RuntimeError, match="No backend"):
        dist.all_reduce(torch.ones(1))
    carry_host_tensors("cuda")
    carry_host_tensors("cuda")  # which has nothing to do
    assert dist.group.WORLD is given
    sums = []
    mine = new_subgroup([[0, 2], [1, 3]], timedelta(seconds=20))
    for group in (given, mine):
        number = torch.full((1,), float(rank))
        dist.all_reduce(number, group=group)
        sums.append(number.item())
    alone = new_group([rank], among_members=True)
    return *sums, sorted(device.type for device in alone._device_types)


def test_a_group_without_the_host_gets_it_and_so_do_groups_beside_it():
    found = run_ranks(sums_on_groups_beside_one_without_the_host, 4)
    assert found == [(6.0, float(rank % 2 * 2 + 2), ["cpu", "cuda"]) for rank in range(4)]


class Bound:
    """A process group that notes what it is bound to when groups are made."""

    bound_device_id = torch.device("cuda", 1)


def test_groups_are_not_split_off_from_a_bound_one(monkeypatch):
    bound, seen = Bound(), []

    def make(*arguments: object, **options: object) -> tuple[str, list[str]]:
        seen.append((bound.bound_device_id, options.get("backend", arguments[-1])))
        return "group", []

    monkeypatch.setattr("smp_strategy.distributed.process_groups.default_group", lambda: bound)
    monkeypatch.setattr(dist, "new_group", make)
    monkeypatch.setattr(dist, "new_subgroups_by_enumeration", make)
    for given, backends in [("cuda:nccl2", "cpu:gloo,cuda:nccl2"), ("cpu:gloo,cuda:nccl-lazy", None)]:
        monkeypatch.setattr(dist.distributed_c10d, "get_backend_config", lambda given=given: given)
        new_group([0])
        new_subgroup([[0], [1]])
        assert seen == [(None, backends), (None, backends)]
        seen.clear()
    assert bound.bound_device_id == torch.device("cuda", 1)
