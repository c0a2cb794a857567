"""Measures a wired checkpoint with lm-eval from Python, on a task of one's own. (`ladder eval` does it for several
wirings side by side.)

python examples/lm_eval_python.py DIRECTORY
"""

import json
import sys
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import ladder.hf  # noqa: F401  without it, DIRECTORY cannot be loaded

ROWS = [{"text": text} for text in ("never wait for the network", "each sub-block reads the stream one result late")]


def main(directory: Path) -> float:
    """Bits per byte of the texts."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        task = {
            "task": "texts", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}},
            "test_split": "test", "output_type": "loglikelihood_rolling", "doc_to_text": "",
            "doc_to_target": "{{text}}", "metric_list": [{"metric": "bits_per_byte"}],
        }  # fmt: skip
        model = HFLM(str(directory), device="cpu", dtype="float32", batch_size=2)
        tasks = TaskManager(include_defaults=False)  # those that come with lm-eval are thousands of files
        results = lm_eval.simple_evaluate(model, tasks=[task], task_manager=tasks, bootstrap_iters=0)
    value = float(results["results"]["texts"]["bits_per_byte,none"])
    print(f"{value:.3f} bits per byte; wiring {model.model.config.wiring}")
    return value


if __name__ == "__main__":
    main(Path(sys.argv[1]))
