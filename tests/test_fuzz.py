"""Changed checkpoints, configs, index files and tokenizers: each works or is refused with one sentence, and nothing
outside of its folder is opened. `experiments/fuzz.py` draws thousands.
"""

from pathlib import Path

import pytest

from tests.fuzzing import Fuzzer

NUMBER = 200


@pytest.mark.filterwarnings("ignore")
def test_changed_checkpoints(tmp_path: Path) -> None:
    fuzzer = Fuzzer(tmp_path)
    for seed in range(NUMBER):
        fuzzer.run(seed)
    assert fuzzer.failures == []
    assert fuzzer.ended["works"] > NUMBER // 10 and fuzzer.ended["refused"] > NUMBER // 2  # both happen
