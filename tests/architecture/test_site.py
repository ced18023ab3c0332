"""The site of the pages: every page has its place in the navigation, and nothing comes from elsewhere.

``make docs`` builds it, in an environment of its own.
"""

import pickle
import re
import traceback
from collections import Counter
from pathlib import Path

import pytest
import yaml

import smp_strategy
from smp_strategy.errors import FAILURES, ConfigError, PeerFailedError

ROOT = Path(__file__).parents[2]
MADE_BY_THE_HOOKS = {"contributing.md"}
# Numbers on the page of failures that no error of the package can tell.
WITHOUT_AN_ERROR = {
    103: "the variable is ignored",
    106: "Lightning does not know the word",
    108: "a line in the log",
    **dict.fromkeys((201, 204), "the device's error"),
    **dict.fromkeys((401, 402, 403, 404, 405), "another result"),
    504: "a line in the log",
    **dict.fromkeys((506, 507), "an exit code; the process cannot speak"),
    508: "the line that replaces the frames says it",
    604: "the error is that of 502",
    **dict.fromkeys((701, 702, 703), "a matter of time"),
}


class Loader(yaml.SafeLoader):
    """Keeps names of Python objects as text."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


@pytest.fixture(scope="module")
def site():
    return yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def pages_of(nav):
    for entry in nav:
        [content] = entry.values()
        yield from pages_of(content) if isinstance(content, list) else [content]


def test_the_navigation_lists_every_page_once(site):
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert Counter(pages_of(site["nav"])) == Counter(pages | MADE_BY_THE_HOOKS)


def test_files_that_the_site_names_exist_and_nothing_comes_from_elsewhere(site):
    assert all((ROOT / hook).is_file() for hook in site["hooks"])
    assert site["strict"] is True
    assert site["theme"]["font"] is False
    assert all((ROOT / "docs" / style).is_file() for style in site["extra_css"])
    assert not {"extra_javascript", "repo_url"} & set(site)


def test_the_reference_has_every_public_name_once():
    entries = re.findall(r"^::: smp_strategy\.(\w+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert Counter(entries) == Counter(set(smp_strategy.__all__) - {"__version__"})


def test_pages_show_every_picture():
    shown = {
        name
        for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
        for name in re.findall(r"pictures/(\w+)\.svg", page.read_text())
    }
    assert shown == {path.stem for path in (ROOT / "docs" / "pictures").glob("*.svg")}


def numbers_of_failures():
    return [
        int(each) for each in re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "failures.md").read_text(), re.MULTILINE)
    ]


def messages_of_the_package():
    # Literals that Python joins.
    files = (path for path in (ROOT / "smp_strategy").rglob("*.py") if path.name != "errors.py")
    return re.sub(r'"\s*\n\s*f?[\'"]', "", "".join(path.read_text() for path in files))


def test_messages_on_the_page_of_failures_are_those_of_the_package():
    sources = messages_of_the_package()
    symptoms = re.findall(r"^\| \d+ \| (.*?) \|", (ROOT / "docs" / "failures.md").read_text(), re.MULTILINE)
    messages = [text.removeprefix("... ") for symptom in symptoms for text in re.findall(r"`([^`]+ [^`]+)`", symptom)]
    assert len(messages) > 8
    assert not [message for message in messages if message not in sources]


def test_numbers_of_failures_are_cited_once():
    assert numbers_of_failures() == sorted(set(numbers_of_failures()))


def test_errors_tell_their_numbers_on_the_page_of_failures():
    sources = messages_of_the_package()
    assert not [words for words in FAILURES if words not in sources]
    others = [int(number) for number in re.findall(r"\{MORE\}(\d+)", sources)]
    assert sorted({*FAILURES.values(), *others, *WITHOUT_AN_ERROR}) == numbers_of_failures()
    assert not {*FAILURES.values(), *others} & {*WITHOUT_AN_ERROR}


@pytest.mark.parametrize(("words", "number"), FAILURES.items())
def test_the_last_line_of_an_error_is_its_number(words, number):
    error = pickle.loads(pickle.dumps(ConfigError(f"`x` {words} `y`.")))
    assert str(error) == f"`x` {words} `y`."
    assert traceback.format_exception_only(error)[-1] == f"More: docs/failures.md, {number}\n"
    assert not hasattr(PeerFailedError(f"rank 1 failed first: {error}"), "__notes__")
