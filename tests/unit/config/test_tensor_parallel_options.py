"""Options of tensor parallelism."""

import pytest

from smp_strategy.config.config import SMPConfig
from smp_strategy.errors import ConfigError


@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel": {"*.up": "column"}}, {"tensor_parallel_strict": True}, {"prescaled_batch": False}],
)
def test_options_about_split_layers_are_refused_where_none_are_split(options):
    [name] = options
    with pytest.raises(ConfigError, match=f"`{name}=.* has no effect, because no layers are split"):
        SMPConfig(**options)
    SMPConfig(tensor_parallel_degree=2, **options)


def test_patterns_are_given_in_the_environment_too(monkeypatch):
    monkeypatch.setenv("SMP_TENSOR_PARALLEL", "*.mlp.up=column, *.mlp.down=row")
    patterns = SMPConfig.from_options(tensor_parallel_degree=2).tensor_parallel
    assert patterns == {"*.mlp.up": "column", "*.mlp.down": "row"}
    for text in ("*.mlp.up", "up=column,up=row", "up=column, up=column", "up=column,,down=row", ","):
        monkeypatch.setenv("SMP_TENSOR_PARALLEL", text)
        with pytest.raises(ConfigError) as failure:
            SMPConfig.from_options(tensor_parallel_degree=2)
        assert str(failure.value) == (
            f"`tensor_parallel` must be collections.abc.Mapping[str, str] | None, but is {text!r} (str). Write each "
            "name once, and one value for it: `blocks.*.up=column,blocks.*.down=row`. `tensor_parallel` comes from the "
            "environment variable SMP_TENSOR_PARALLEL."
        )
