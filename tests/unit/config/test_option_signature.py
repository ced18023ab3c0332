"""Options have types and sentences in signatures, docstrings, the reference and for editors, all from one source."""

import dataclasses
import importlib.util
import inspect
import pydoc
import re
import typing
from pathlib import Path

import pytest

from smp_strategy import SMPConfig, SMPPlugin, SMPStrategy, plan_partition
from smp_strategy.config.config import option_types
from smp_strategy.config.keywords import OptionKeywords
from smp_strategy.config.option_signature import concerns, option_texts, with_option_docs
from smp_strategy.config.variables import ALIASES
from smp_strategy.integrations.lightning.strategy import StrategyHooks

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def writer():
    spec = importlib.util.spec_from_file_location("write_options", ROOT / "docs" / "options.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_option_has_a_sentence():
    assert set(option_texts()) == set(option_types())
    for name, text in option_texts().items():
        assert len(text) > 15, name
        assert text.endswith((".", ")")), name


def test_the_written_files_are_those_of_the_options(writer, tmp_path):
    for name in (writer.PAGE, writer.KEYWORDS):
        (tmp_path / name).parent.mkdir(parents=True)
    writer.main(tmp_path)
    for name in (writer.PAGE, writer.KEYWORDS):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), f"make options writes {name} again"


def test_keywords_are_the_options_and_their_aliases_and_lists_stand_for_tuples():
    hints = typing.get_type_hints(OptionKeywords)
    assert set(hints) == set(option_types()) | set(ALIASES)
    assert OptionKeywords.__required_keys__ == frozenset()
    for name, hint in option_types().items():
        if "tuple" not in str(hint):
            assert hints[name] == hint, name
    assert hints["unit_classes"] == typing.Sequence[str] or "Sequence[str]" in str(hints["unit_classes"])


@pytest.mark.parametrize("call", [SMPStrategy, SMPPlugin])
def test_help_shows_each_option_with_type_default_and_sentence(call):
    told = " ".join(re.sub(r"^ \|", "", pydoc.plain(pydoc.render_doc(call)), flags=re.MULTILINE).split())
    signature = inspect.signature(call)
    for concern in concerns():
        for field in dataclasses.fields(concern):
            parameter = signature.parameters[field.name]
            assert parameter.default == field.default
            assert parameter.annotation == option_types()[field.name]
            assert f"{field.name}: {option_texts()[field.name]}" in told
    assert " options: fields of" not in told


def test_without_source_files_help_is_as_short_as_it_was(monkeypatch):
    def missing(module):
        raise OSError("source code not available")

    option_texts.cache_clear()
    monkeypatch.setattr(inspect, "getsource", missing)
    try:
        assert with_option_docs(StrategyHooks.__doc__) == StrategyHooks.__doc__
    finally:
        option_texts.cache_clear()


@pytest.mark.parametrize("call", [SMPStrategy.__init__, SMPConfig.from_options, plan_partition])
def test_type_checkers_see_typed_options(call):
    hints = inspect.unwrap(getattr(call, "__func__", call)).__annotations__
    assert hints["options"] == typing.Unpack[OptionKeywords]
