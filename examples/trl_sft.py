"""Fine-tunes a wired checkpoint with TRL, by its path.

python examples/trl_sft.py DIRECTORY OUT
"""

import sys
from pathlib import Path

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import ladder.hf  # noqa: F401  without it, TRL cannot load DIRECTORY

TEXTS = [{"text": "never wait for the network, and not for each other"}] * 8


def main(directory: Path, out: Path, steps: int = 8) -> list[float]:
    """The losses, one a step; OUT has the same wiring as DIRECTORY."""
    options = SFTConfig(
        str(out), max_steps=steps, per_device_train_batch_size=4, max_length=32, learning_rate=1e-2, logging_steps=1,
        lr_scheduler_type="constant", report_to=[], save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = SFTTrainer(str(directory), options, train_dataset=Dataset.from_list(TEXTS))
    trainer.train()
    trainer.save_model()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(f"loss {losses[0]:.3f} before, {losses[-1]:.3f} after {steps} steps; wiring {trainer.model.config.wiring}")
    return losses


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
