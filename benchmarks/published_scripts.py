"""Published scripts of SageMaker's model parallel library, run as they are by ``smp run`` on two ranks.

::

    git clone https://github.com/aws/amazon-sagemaker-examples
    python benchmarks/published_scripts.py amazon-sagemaker-examples        # or names of cases behind it

Each case takes a folder of scripts from the history of that repository, tiny data and a tiny model, and prints the
losses, or the last error. Without a GPU the scripts' calls of ``torch.cuda`` are replaced by nothing.
"""

import argparse
import gzip
import io
import json
import os
import random
import re
import subprocess
import sys
import tarfile
import tempfile
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

MODEL = "training/distributed_training/pytorch/model_parallel"
GPT2, NEOX, GPT_J = f"{MODEL}/gpt2", f"{MODEL}/gpt-neox", " archived/smp-train-gptj-sharded-data-parallel-tp"
PIPELINE = "--pipeline_parallel_degree 2 --microbatches 2"
# Name: commit, folder, script, arguments.
CASES = {
    "gpt2-pp2-fp16": ("198c0bd6", GPT2, "train.py", f"{PIPELINE} --manual_partition 1 --fp16 1"),
    "gpt2-tp2": ("198c0bd6", GPT2, "train.py", "--tensor_parallel_degree 2 --activation_checkpointing 1"),
    "gpt2-delayed-bf16": ("198c0bd6", GPT2, "train.py", f"{PIPELINE} --delayed_param 1 --bf16 1 --skip_tracing 1"),
    "gpt2-zero1": ("198c0bd6", GPT2, "train.py", "--shard_optimizer_state 1"),
    "gpt2-saved": ("198c0bd6", GPT2, "train.py", f"{PIPELINE} --save_final_full_model 1"),
    "gpt2-resumed": ("198c0bd6", GPT2, "train.py", f"{PIPELINE} --load_partial 1 --max_steps 6"),
    "gpt2-sdp2": ("198c0bd6", GPT2, "train.py", "--sharded_data_parallel_degree 2 --bf16 1"),
    "gpt2-split-layers": ("198c0bd6", GPT2, "train.py", "--tensor_parallel_degree 2 --use_distributed_transformer 1"),
    "neox-pp2": ("173ccfd9", NEOX, "train.py", f"{PIPELINE} --model_type gpt_neox"),
    "gpt-j-tp2": ("HEAD", GPT_J, "train.py", "--tensor_parallel_degree 2 --model_type gpt_neox"),
}
SMALL = (
    "--num_layers 4 --hidden_width 32 --num_heads 2 --vocab_size 64 --max_context_width 32 --train_batch_size 4 "
    "--val_batch_size 4 --max_steps 4 --use_distributed_transformer 0 --checkpoint_freq 2 --validation_freq 2 "
    "--validation_batches 2 --embd_pdrop 0 --attn_pdrop 0 --resid_pdrop 0 --summary_first_pdrop 0 --lr 1e-3"
)
LOSS = re.compile(r"Batch \d+ Loss: ([\d.]+)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("examples", type=Path)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        for name in given.cases or CASES:
            print(f"{name:20} {result(given.examples, name, Path(folder))}", flush=True)


def result(examples: Path, name: str, folder: Path) -> str:
    commit, place, script, arguments = CASES[name]
    scripts = folder / commit / Path(place).name
    if not scripts.exists():
        found = subprocess.run(["git", "-C", examples, "archive", f"{commit}:{place}"], capture_output=True, check=True)
        with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
            archive.extractall(scripts, filter="data")
    channels = {"TRAIN": "train", "TEST": "test"}
    environment = {
        **os.environ,
        **{f"SM_CHANNEL_{key}": str(folder / value) for key, value in channels.items()},
        "SM_MODEL_DIR": str(folder / "model"),
        "SM_OUTPUT_DATA_DIR": str(folder / "output"),
        "SM_NUM_GPUS": "2",
        "OMP_NUM_THREADS": "1",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = [*SMALL.split(), *arguments.split(), "--checkpoint-dir", str(folder / "checkpoints")]
    done = subprocess.run(
        [*torchrun, __file__, "rank", script, *options],
        cwd=scripts,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return "losses " + " ".join(LOSS.findall(done.stdout + done.stderr))
    errors = [line for line in done.stderr.splitlines() if re.search(r"Error: (?!another)", line)]
    return f"fails: {(errors or [done.stderr[-2000:]])[0]}"


def write_data(folder: Path) -> None:
    draw = random.Random(0)
    for name in ("train", "test"):
        (folder / name).mkdir()
        with gzip.open(folder / name / f"{name}ing_0.json.gz", "wt") as file:
            for _ in range(32):
                start = draw.randrange(60)
                ids = [(start + 3 * number) % 64 for number in range(32)]
                file.write(json.dumps({"input_ids": ids, "attention_mask": [1] * 32}) + "\n")


def run(arguments: list[str]) -> int:
    """One rank."""
    import torch

    from smp_strategy.integrations.sagemaker.run_script import main as run_script

    if not torch.cuda.is_available():
        for name in ("synchronize", "set_device", "empty_cache", "manual_seed"):
            setattr(torch.cuda, name, eval("lambda *args, **options: None"))  # a function of its own each
    for name in ("h5py", "py3nvml"):  # for data and reports that are not asked for
        if find_spec(name) is None:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__spec__ = ModuleSpec(name, None)
            vars(sys.modules[name])["py3nvml"] = None
    return run_script(arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        sys.exit(run(sys.argv[2:]))
    main()
