"""All blocks of code on the pages: the test that runs each, or why none does.

``PROOFS`` lists them in the order of the pages. Commands are read from every block: options of ``smp``, overrides of
Hydra, targets of make and files are checked.
"""

import re
import shlex
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from smp_strategy.cli import _parser
from tests.examples.test_pages import PAGES

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^(?:\$ )?((?:smp|python|make|accelerate|torchrun) .*)$", re.MULTILINE)
# Reasons not to run a block.
COMMANDS = "commands, which the test below reads"
FRAGMENT = "a fragment: test_pages.py checks options and names"
MODEL = "a fragment of a model of the reader"
OUTPUT = "an example of output"
PROOFS = {
    "README.md": [COMMANDS, "test_readme.py", "test_readme.py", FRAGMENT, COMMANDS, COMMANDS],
    "CONTRIBUTING.md": [COMMANDS, "a drawing; the import contracts check it"],
    "docs/accelerate.md": [
        MODEL,
        COMMANDS,
        "parts of configs/accelerate, which test_accelerate_launch.py starts",
        COMMANDS,
        COMMANDS,
        "test_accelerate_launch.py",
        "a part of configs/accelerate_train.yaml, which test_accelerate_runs.py starts",
        COMMANDS,
    ],
    "docs/activations.md": [FRAGMENT, FRAGMENT, OUTPUT],
    "docs/checkpoint-tools.md": [COMMANDS, COMMANDS, COMMANDS, COMMANDS, FRAGMENT, COMMANDS, COMMANDS],
    "docs/checkpoints.md": [FRAGMENT, FRAGMENT, OUTPUT],
    "docs/clusters.md": [COMMANDS, COMMANDS, COMMANDS, COMMANDS, COMMANDS],
    "docs/costs.md": [FRAGMENT, FRAGMENT],
    "docs/data-parallel.md": [FRAGMENT, MODEL],
    "docs/delayed-initialization.md": [MODEL, MODEL],
    "docs/faults.md": [OUTPUT, OUTPUT],
    "docs/gpu.md": [COMMANDS],
    "docs/hf-trainer.md": [FRAGMENT, COMMANDS],
    "docs/hydra.md": ["configs/train.yaml, which test_runs.py starts", COMMANDS],
    "docs/lightning.md": [FRAGMENT, FRAGMENT],
    "docs/memory.md": [MODEL, OUTPUT],
    "docs/microbatches.md": [MODEL, MODEL],
    "docs/models-and-steps.md": [FRAGMENT],
    "docs/monitoring.md": ["test_lightning_monitor.py", FRAGMENT, OUTPUT],
    "docs/partitioning.md": [COMMANDS, FRAGMENT, COMMANDS, "a part of a file that a run has written"],
    "docs/placement.md": [FRAGMENT, "test_mesh_shape.py"],
    "docs/planner.md": [COMMANDS, "a cluster of the reader", COMMANDS],
    "docs/precision.md": [FRAGMENT],
    "docs/resume.md": [MODEL, COMMANDS, FRAGMENT, FRAGMENT, COMMANDS],
    "docs/sagemaker.md": [COMMANDS, MODEL, "test_smp_run.py", FRAGMENT, COMMANDS, MODEL, MODEL],
    "docs/schedules.md": [
        FRAGMENT,
        "test_published_schedules.py",
        "test_published_schedules.py",
        OUTPUT,
        "a fragment: docs/sample_reports.py makes the same calls",
    ],
    "docs/sharding.md": [FRAGMENT],
    "docs/tensor-parallel-details.md": [MODEL],
    "docs/tensor-parallel.md": [FRAGMENT, "test_split_models.py", "a part of an option", MODEL],
}
WITHOUT_LANGUAGE = {"docs/fine-tuning.md": COMMANDS, "docs/index.md": COMMANDS, "docs/moving.md": COMMANDS}


def blocks(page):
    return [(language, code) for _, language, code in FENCE.findall((ROOT / page).read_text())]


def pages():
    return ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def test_each_block_of_code_has_a_test_or_a_reason():
    executed = {f"docs/{page}.md" for page in PAGES}  # test_pages.py
    found = {page: len(blocks(page)) for page in pages() if page not in executed and blocks(page)}
    assert found == {page: len(proofs) for page, proofs in PROOFS.items()}
    for page in executed:
        assert page in WITHOUT_LANGUAGE or all(language for language, _ in blocks(page)), page


def test_the_tests_of_blocks_exist_and_read_the_page():
    tests = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    for page, proofs in PROOFS.items():
        for proof in proofs:
            for name in re.findall(r"\btest_\w+\.py", proof):
                assert name in tests, f"{page}: {proof}"
                assert proof != name or Path(page).name in tests[name], f"{page}: {proof}"


def commands():
    """Commands on all pages, with their page."""
    for page in pages():
        for language, code in blocks(page):
            if language in ("", "console"):
                for command in COMMAND.findall(code.replace("\\\n", " ")):
                    if command := re.split(r" +#| \.\.\.", command)[0].strip():
                        yield page, command


def problem_of(command):
    """What keeps ``command`` from running, if anything."""
    program, *arguments = shlex.split(command)
    if program == "smp":
        if arguments[0] == "profile":  # the command behind `--` is another program's
            arguments = [*arguments[: arguments.index("--")], "true"]
        try:
            _parser().parse_args(arguments)
        except SystemExit:
            return "options"
    makefile = (ROOT / "Makefile").read_text()
    if program == "make" and not all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in arguments):
        return "targets"
    for file in arguments:
        if file.startswith(("examples/", "configs/", "benchmarks/")) and not (ROOT / file).exists():
            return f"no {file}"
    script = next((each for each in arguments if each.startswith("examples/")), "")
    if script in ("examples/train.py", "examples/finetune.py"):
        # Launchers of Hydra are packages of their own.
        given = arguments[arguments.index(script) + 1 :]
        overrides = [each for each in given if each != "-m" and not re.match(r"hydra[./]launcher", each)]
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            for number in range(2 if "-m" in arguments else 1):
                try:
                    compose(Path(script).stem, [_chosen(each, number) for each in overrides])
                except HydraException as error:
                    return str(error)
    return None


def _chosen(override, number):
    """One of the values of a sweep."""
    key, _, values = override.partition("=")
    values = values.split(",")
    return f"{key}={values[number] if len(values) > 1 else values[0]}"


def test_commands_on_the_pages_can_be_read():
    found = list(commands())
    assert len(found) > 60
    assert not [(page, command, problem) for page, command in found if (problem := problem_of(command))]


def test_a_command_that_cannot_run_is_found():
    assert problem_of("smp export run/last.ckpt --no-such-option") == "options"
    assert problem_of("make nothing") == "targets"
    assert problem_of("python examples/nothing.py") == "no examples/nothing.py"
    assert "no_such_layout" in problem_of("python examples/train.py smp=no_such_layout")
