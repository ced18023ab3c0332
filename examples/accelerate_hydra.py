"""``accelerate_train.py`` with everything from Hydra: the degrees, the Accelerator, the options.

    accelerate launch --config_file configs/accelerate/cpu_4.yaml examples/accelerate_hydra.py
    accelerate launch --config_file configs/accelerate/cpu_4.yaml examples/accelerate_hydra.py smp=tp2_pp2

The launcher's file says how many processes there are; their layout is that of ``smp=...``, whatever the file says.
"""

import hydra
from omegaconf import DictConfig

from accelerate_train import train

__all__ = ["main"]


@hydra.main(version_base="1.3", config_path="../configs", config_name="accelerate_train")
def main(cfg: DictConfig) -> float:
    """Train, and return the last validation loss, so that sweeps can minimise it."""
    return train(hydra.utils.instantiate(cfg.accelerator, _convert_="all"), hydra.utils.instantiate(cfg.options))


if __name__ == "__main__":
    main()
