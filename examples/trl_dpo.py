"""Trains a wired checkpoint on preferences with TRL (DPO), by its path. TRL loads it twice: the model, and the
reference that it is compared with. So the first loss is ln 2: both say the same.

python examples/trl_dpo.py DIRECTORY OUT
"""

import sys
from pathlib import Path

from datasets import Dataset
from trl import DPOConfig, DPOTrainer

import ladder.hf  # noqa: F401  without it, TRL cannot load DIRECTORY

PAIRS = [{"prompt": "Who waits?", "chosen": " Nobody.", "rejected": " Everybody, for every all-reduce."}] * 8


def main(directory: Path, out: Path, steps: int = 4) -> list[float]:
    """The losses, one a step; OUT has the same wiring as DIRECTORY.

    A model that was rewired in memory has no path that a reference could be loaded from, and TRL's error says so: save
    it first, or give `ref_model`.
    """
    options = DPOConfig(
        str(out), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1,
        lr_scheduler_type="constant", report_to=[], save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = DPOTrainer(str(directory), args=options, train_dataset=Dataset.from_list(PAIRS))
    trainer.train()
    trainer.save_model()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(f"loss {losses[0]:.3f} before (ln 2), {losses[-1]:.3f} after {steps} steps")
    return losses


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
