"""Code on the pages that a newcomer meets first runs as printed.

Each block of Python is a program: by itself if it imports torch, else after the class and the data of the README's
script. The programs of a page share a folder, as its commands do. A first line ``# saved as NAME`` makes a file of a
block. Sections of YAML are options. On all other pages, options and names of the package exist.
"""

import ast
import re
from pathlib import Path

import pytest
import yaml

import smp_strategy
from smp_strategy.cli import main
from smp_strategy.config.config import SMPConfig
from tests.examples.test_readme import CODE, ROOT, run
from tests.interpreters import forked_interpreters

PAGES = ["does-not-fit", "failures", "fewer-gpus", "fine-tuning", "ideas", "idle", "index", "moving"]
BLOCK = re.compile(r"^```(python|yaml|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CLASS, BEGIN, _ = CODE.partition('if __name__ == "__main__":')
DATA = "torch.manual_seed(0)\ndata = torch.utils.data.DataLoader(torch.randn(128, 32), batch_size=64)\n"
PREFACE = f"from smp_strategy import SMPStrategy\n{CLASS}\n{DATA}\n"
# The folder that the page about fine-tuning speaks of.
PRETRAINED = """
import os
from transformers import GPT2Config, GPT2LMHeadModel

if "LOCAL_RANK" not in os.environ:  # the first process
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=4, n_head=2)).save_pretrained(
        "path/to/a/model"
    )
"""


def blocks(page):
    return BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text())


def literal(node):
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_what_a_page_shows_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number, (language, code) in enumerate(blocks(page)):
        if language == "yaml":
            SMPConfig.from_options(**yaml.safe_load(code)["smp_config"])
        elif language == "console":
            for command in re.findall(r"^\$ smp (.*)$", code, re.MULTILINE):
                assert main(command.split()) == 0
                assert capsys.readouterr().out
        elif saved := re.match(r"# saved as (\S+)\n", code):
            Path(saved[1]).write_text(code)
        else:
            preface = "" if re.search(r"^import torch$", code, re.MULTILINE) else PREFACE
            Path(f"program{number}.py").write_text(preface + PRETRAINED * (page == "fine-tuning") + code)
            with forked_interpreters():
                run(tmp_path, f"program{number}.py")


def test_the_start_page_shows_the_script_of_the_readme():
    assert BEGIN
    assert "\n[The script of the README](../README.md#a-script)\n" in (ROOT / "docs" / "index.md").read_text()


def test_code_on_all_pages_names_options_and_functions_that_exist():
    strategies = 0
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for language, code in BLOCK.findall(page.read_text()):
            for node in ast.walk(ast.parse(code)) if language == "python" else ():
                match node:
                    case ast.Call(func=ast.Name("SMPStrategy" | "SMPPlugin" as name), keywords=given):
                        options = {each.arg: literal(each.value) for each in given if literal(each.value) is not None}
                        getattr(smp_strategy, name)(**options)
                        strategies += 1
                    case ast.Attribute(ast.Name("smp_strategy"), attr):
                        assert hasattr(smp_strategy, attr) or (ROOT / "smp_strategy" / f"{attr}.py").exists(), page
                    case ast.ImportFrom("smp_strategy", names):
                        assert all(hasattr(smp_strategy, each.name) for each in names), page
    assert strategies > 30
