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
from typing import NamedTuple

import torch

MODEL = "training/distributed_training/pytorch/model_parallel"
GPT2, NEOX, GPT_J, CUSTOM = f"{MODEL}/gpt2", f"{MODEL}/gpt-neox", f"{MODEL}/gpt-j", f"{MODEL}/gpt2-custom"
PIPELINE, HALVES = "--pipeline_parallel_degree 2 --microbatches 2", "--tensor_parallel_degree 2"
ALONE = "--microbatches 2"
BERT_SCRIPT = "sagemaker_smp_pretrain.py"
# Without decay: split models have layer norms of the library's class, which these scripts except from it.
WIDE = "--hidden_width 128 --weight_decay 0"
WHOLE = f"--tensor_parallel_degree 1 {WIDE}"
# A limit that clips nothing, because without sharding the scripts do not clip.
SHARDED = "--sharded_data_parallel_degree 2 --grad_clip 1000"
OWN = "--use_distributed_transformer 0"

SMALL = (
    "--num_layers 4 --hidden_width 32 --num_heads 2 --vocab_size 64 --max_context_width 32 --train_batch_size 4 "
    "--val_batch_size 4 --max_steps 4 --lr_decay_iters 6 --checkpoint_freq 2 --validation_freq 2 "
    "--validation_batches 2 --embd_pdrop 0 --attn_pdrop 0 --resid_pdrop 0 --summary_first_pdrop 0 --lr 1e-3 "
    "--checkpoint-dir {folder}/checkpoints"
)
BERT = (
    "--input_dir {train} --config_file {folder}/bert.json --output_dir {folder}/bert --smp 1 --do_train 1 "
    "--local_rank 0 --train_batch_size 4 --max_seq_length 32 --max_predictions_per_seq 4 --max_steps 4 "
    "--steps_this_run 4 --learning_rate 1e-3 --skip_checkpoint 1 --disable_progress_bar 1 --warmup_proportion 0.5"
)


class Case(NamedTuple):
    """A script: commit and folder of the repository, arguments, ranks, and the case that has the same losses.

    ``common`` are arguments of all cases of a script, ``parameters`` those of the launcher.
    """

    commit: str
    folder: str
    script: str
    arguments: str = ""
    ranks: int = 2
    same_as: str = ""
    common: str = SMALL
    parameters: str = ""


CASES = {
    "gpt2-one": Case("198c0bd6", GPT2, "train.py", ALONE, 1),
    "gpt2-pp2": Case("198c0bd6", GPT2, "train.py", f"{PIPELINE} --manual_partition 1", 2, "gpt2-one"),
    "gpt2-tp2": Case("198c0bd6", GPT2, "train.py", f"{HALVES} --checkpoint_sublayers 1", 2, "gpt2-one"),
    "gpt2-pp2-tp2": Case("198c0bd6", GPT2, "train.py", f"{PIPELINE} {HALVES}", 4, "gpt2-one"),
    "gpt2-sdp2": Case("198c0bd6", GPT2, "train.py", f"{SHARDED} --same_seed 1", 2, "gpt2-dp2"),
    "gpt2-dp2": Case("198c0bd6", GPT2, "train.py", "--same_seed 1", 2),
    "gpt2-fp16": Case("198c0bd6", GPT2, "train.py", f"{ALONE} --fp16 1", 1),
    "gpt2-pp2-fp16": Case("198c0bd6", GPT2, "train.py", f"{PIPELINE} --manual_partition 1 --fp16 1", 2, "gpt2-fp16"),
    "gpt2-delayed-bf16": Case("198c0bd6", GPT2, "train.py", f"{PIPELINE} --delayed_param 1 --bf16 1 --skip_tracing 1"),
    "gpt2-zero1": Case("198c0bd6", GPT2, "train.py", "--shard_optimizer_state 1 --same_seed 1", 2, "gpt2-dp2"),
    "gpt2-saved": Case("198c0bd6", GPT2, "train.py", f"{PIPELINE} --save_final_full_model 1", 2, "gpt2-one"),
    "gpt2-resumed": Case("198c0bd6", GPT2, "train.py", f"{PIPELINE} --load_partial 1 --max_steps 6", 2, "gpt2-six"),
    "gpt2-six": Case("198c0bd6", GPT2, "train.py", f"{ALONE} --max_steps 6", 1),
    "gpt2-own-one": Case("198c0bd6", GPT2, "train.py", f"{ALONE} {OWN}", 1),
    "gpt2-own-pp2": Case("198c0bd6", GPT2, "train.py", f"{PIPELINE} {OWN}", 2, "gpt2-own-one"),
    "gpt2-own-tp2": Case("198c0bd6", GPT2, "train.py", f"{HALVES} {OWN}", 2, "gpt2-one"),
    "gpt2-own-dp2": Case("198c0bd6", GPT2, "train.py", f"--same_seed 1 {OWN}", 2),
    "gpt2-own-sdp2": Case("198c0bd6", GPT2, "train.py", f"{SHARDED} --same_seed 1 {OWN}", 2, "gpt2-own-dp2"),
    "gpt2-simple-one": Case("2cbfea64", GPT2, "train_gpt_simple.py", ALONE, 1),
    "gpt2-simple-pp2": Case("2cbfea64", GPT2, "train_gpt_simple.py", PIPELINE, 2, "gpt2-simple-one"),
    "gpt2-simple-tp2": Case("2cbfea64", GPT2, "train_gpt_simple.py", HALVES, 2, "gpt2-simple-one"),
    "gpt2-simple-dp2": Case("2cbfea64", GPT2, "train_gpt_simple.py", "--same_seed 1", 2),
    "gpt2-simple-sdp2": Case(
        *("2cbfea64", GPT2, "train_gpt_simple.py", f"{SHARDED} --same_seed 1 --save_final_full_model 1"),
        *(2, "gpt2-simple-dp2"),
        parameters='{"sdp_gradient_clipping": 1000}',
    ),
    "gpt2-custom-one": Case("53dedee1", CUSTOM, "train_gpt_custom.py", f"{ALONE} {WHOLE}", 1),
    "gpt2-custom-pp2": Case("53dedee1", CUSTOM, "train_gpt_custom.py", f"{PIPELINE} {WHOLE}", 2, "gpt2-custom-one"),
    "gpt2-custom-tp2": Case(
        "53dedee1",
        CUSTOM,
        "train_gpt_custom.py",
        f"{HALVES} {WIDE} --match_weights 1",
        2,
        "gpt2-custom-one",
    ),
    "neox-one": Case("173ccfd9", NEOX, "train.py", f"{ALONE} --model_type gpt_neox", 1),
    "neox-pp2": Case("173ccfd9", NEOX, "train.py", f"{PIPELINE} --model_type gpt_neox", 2, "neox-one"),
    "neox-tp2": Case("653a1f4d", GPT_J, "train.py", f"{HALVES} --model_type gpt_neox", 2, "neox-one"),
    "neox-own-one": Case("173ccfd9", NEOX, "train.py", f"{ALONE} --model_type gpt_neox {OWN}", 1),
    "neox-own-pp2": Case("173ccfd9", NEOX, "train.py", f"{PIPELINE} --model_type gpt_neox {OWN}", 2, "neox-own-one"),
    "gpt-j-one": Case("47196909", GPT_J, "train_gptj_simple.py", f"{ALONE} {WHOLE}", 1),
    "gpt-j-pp2": Case("47196909", GPT_J, "train_gptj_simple.py", f"{PIPELINE} {WHOLE}", 2, "gpt-j-one"),
    "gpt-j-tp2": Case("47196909", GPT_J, "train_gptj_simple.py", f"{HALVES} {WIDE}", 2, "gpt-j-one"),
    "gpt-j-fp16": Case(
        "47196909", GPT_J, "train_gptj_simple.py", f"{ALONE} {WHOLE}", 1, "gpt-j-one", parameters='{"fp16": true}'
    ),
    "gpt-neo-one": Case("8e973ecc", f"{MODEL}/gpt-neo", "train_gptneo_simple.py", f"{ALONE} {WHOLE}", 1),
    "gpt-neo-pp2": Case(
        "8e973ecc", f"{MODEL}/gpt-neo", "train_gptneo_simple.py", f"{PIPELINE} {WHOLE}", 2, "gpt-neo-one"
    ),
    "gpt-neo-tp2": Case("8e973ecc", f"{MODEL}/gpt-neo", "train_gptneo_simple.py", f"{HALVES} {WIDE}", 2, "gpt-neo-one"),
    "t5-one": Case("653a1f4d", f"{MODEL}/flan-t5", "train.py", f"{ALONE} --model_type flan_t5 --flash_attention 0", 1),
    "t5-pp2": Case(
        "653a1f4d", f"{MODEL}/flan-t5", "train.py", f"{PIPELINE} --model_type flan_t5 --flash_attention 0", 2, "t5-one"
    ),
    "bert-one": Case("7ed6accf", f"{MODEL}/bert/bert_example", BERT_SCRIPT, "", 1, "", BERT, '{"microbatches": 2}'),
    "bert-pp2": Case(
        *("7ed6accf", f"{MODEL}/bert/bert_example", BERT_SCRIPT, "", 2, "bert-one", BERT),
        '{"partitions": 2, "microbatches": 2, "ddp": true}',
    ),
}
CASES |= {
    f"falcon-{name}": Case(
        *("653a1f4d", f"{MODEL}/falcon", "train.py", f"{more} {OWN} --model_type falcon --num_heads_kv 1"),
        *(ranks, "" if name == "one" else "falcon-one"),
    )
    for name, more, ranks in (("one", ALONE, 1), ("pp2", PIPELINE, 2), ("tp2", HALVES, 2))
}
# Imported by scripts for what these cases do not ask for: data, reports, kernels.
ABSENT = (
    *("requests", "botocore", "botocore.exceptions", "apex.amp", "apex.parallel", "apex.parallel.distributed"),
    "humanize",
    *("h5py", "py3nvml", "boto3", "flash_attn", "flash_attn.flash_attention", "einops"),
    *("apex", "apex.multi_tensor_apply", "amp_C", "apex_C"),
)
UNUSED = (
    *("py3nvml", "FlashAttention", "rearrange", "multi_tensor_applier", "ClientError", "amp", "_amp_state"),
    *("DistributedDataParallel", "flat_dist_call"),
)
# What PyTorch 2 has taken away, a wrapper of the library's version 1.6, tensors of its ZeRO for a log that is off, and
# Falcon before it came to Transformers.
EDITS = {
    r"_parallel_degree > 1 and args\.use_distributed_transformer == 0": r"\g<0> and args.log_param_norms",
    r"from torch\._six import inf": "from torch import inf",
    r"from modelling_RW import": "from transformers import FalconConfig, FalconForCausalLM as",
    r"AutoConfig.*falcon-7b.*\)": "FalconConfig(vocab_size=args.vocab_size)",
    r"model_config\.n_head_kv": "model_config.num_kv_heads",
    r"model_config\.n_head\b": "model_config.num_attention_heads",
    r"model_config\.n_layer\b": "model_config.num_hidden_layers",
    r"m\.module\.module\.transformer": "m.module.transformer",
}
# On a host without a GPU.
ON_THE_HOST = {
    r'torch\.device\("cuda", [^)]*\)\)': 'torch.device("cpu")',
    r"assert torch\.cuda\.is_available\(\)": "pass",
    r"\.cuda\(\)": "",
}
LOSS = re.compile(r"\bLoss: ([\d.]+)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("examples", type=Path)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        for name in given.cases or CASES:
            same = CASES[name].same_as
            print(f"{name:20} {result(given.examples, name, Path(folder))}{same and f' as {same}'}", flush=True)


def result(examples: Path, name: str, folder: Path) -> str:
    case = CASES[name]
    if case.script == BERT_SCRIPT and find_spec("h5py") is None:
        return "not run: its data are HDF5 files (`pip install h5py`)"
    scripts = folder / case.commit / Path(case.folder).name
    if not scripts.exists():
        archive = ["git", "-C", examples, "archive", f"{case.commit}:{case.folder}"]
        found = subprocess.run(archive, capture_output=True, check=True)
        with tarfile.open(fileobj=io.BytesIO(found.stdout)) as file:
            file.extractall(scripts, filter="data")
        for path in scripts.rglob("*.py"):
            text = path.read_text()
            for call, other in {**EDITS, **({} if torch.cuda.is_available() else ON_THE_HOST)}.items():
                text = re.sub(call, other, text)
            path.write_text(text)
    channels = {"TRAIN": "train", "TEST": "test"}
    environment = {
        **os.environ,
        **{f"SM_CHANNEL_{key}": str(folder / value) for key, value in channels.items()},
        "SM_MODEL_DIR": str(folder / "model"),
        "SM_OUTPUT_DATA_DIR": str(folder / "output"),
        "SM_NUM_GPUS": str(case.ranks),
        "OMP_NUM_THREADS": "1",
        "SM_HP_MP_PARAMETERS": case.parameters,
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
    common = case.common.format(folder=folder, train=folder / "train")
    options = [*common.split(), *case.arguments.split()]
    done = subprocess.run(
        [*torchrun, __file__, "rank", case.script, *options],
        cwd=scripts,
        env=environment,
        capture_output=True,
        text=True,
    )
    losses = LOSS.findall(done.stdout + done.stderr)
    if done.returncode == 0:
        return "losses " + " ".join(losses)
    errors = [line for line in done.stderr.splitlines() if re.search(r"Error: (?!another)", line)]
    return f"fails: {(errors or [done.stderr[-2000:]])[0]} {' '.join(losses)}"


def write_data(folder: Path) -> None:
    draw = random.Random(0)
    for name in ("train", "test"):
        (folder / name).mkdir()
        with gzip.open(folder / name / f"{name}ing_0.json.gz", "wt") as file:
            for _ in range(32):
                start = draw.randrange(60)
                ids = [(start + 3 * number) % 64 for number in range(32)]
                file.write(json.dumps({"input_ids": ids, "attention_mask": [1] * 32}) + "\n")
    if find_spec("h5py") is not None:
        write_bert(folder)


def write_bert(folder: Path) -> None:
    import h5py

    draw = random.Random(0)
    for number in range(3):
        with h5py.File(folder / "train" / f"training_{number}.hdf5", "w") as file:
            file["input_ids"] = [[draw.randrange(64) for _ in range(32)] for _ in range(16)]
            file["input_mask"] = [[1] * 32] * 16
            file["segment_ids"] = [[0] * 16 + [1] * 16] * 16
            file["masked_lm_positions"] = [[3, 9, 20, 0]] * 16
            file["masked_lm_ids"] = [[draw.randrange(64) for _ in range(4)] for _ in range(16)]
            file["next_sentence_labels"] = [draw.randrange(2) for _ in range(16)]
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    rest = {"hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    rest |= {"max_position_embeddings": 32, "type_vocab_size": 2, "initializer_range": 0.02}
    (folder / "bert.json").write_text(json.dumps({"vocab_size": 64, **sizes, **rest}))


def run(arguments: list[str]) -> int:
    """One rank."""
    from smp_strategy.integrations.sagemaker.run_script import main as run_script

    if not torch.cuda.is_available():
        for name in ("synchronize", "set_device", "empty_cache", "manual_seed"):
            setattr(torch.cuda, name, eval("lambda *args, **options: None"))  # a function of its own each
    absent = {name for name in ABSENT if "." not in name and find_spec(name) is None}
    for name in ABSENT:
        if name.partition(".")[0] in absent:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__spec__ = ModuleSpec(name, None)
            vars(sys.modules[name]).update(dict.fromkeys(UNUSED, object), __path__=[])
    return run_script(arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        sys.exit(run(sys.argv[2:]))
    main()
