"""What is known of a model before torch is imported: lengths of sequences, and what is refused at once."""

from pathlib import Path

import pytest

from ladder.config.early import check_pattern, early_config, sequence_length
from ladder.errors import LadderError
from ladder.scan.early import check_early, check_original
from ladder.train.options import TrainingOptions
from ladder.wiring import Wiring
from tests.checkpoints import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model"))


def test_sequences_are_as_long_as_the_model_allows() -> None:
    assert [sequence_length(None, context) for context in (512, 8192, None)] == [512, 1024, 1024]
    assert [sequence_length(2048, context) for context in (8192, None)] == [2048, 2048]
    with pytest.raises(LadderError, match=r"^--seq-len 513 is more than the model.s context of 512: give a"):
        sequence_length(513, 512)
    options = TrainingOptions(tokens=4096, batch=2)
    assert (options.length, options.within(512).length, options.within(None).seq_len) == (1024, 512, 1024)
    assert (options.steps, options.within(512).steps, options.within(512).counted) == (2, 4, ("tokens", 1024))


def test_what_is_known_of_an_original(model: Path, tmp_path: Path) -> None:
    config = early_config(model)
    assert config is not None and config.context == 512
    assert check_early(str(model), "ladder", None) == (Wiring.parse("ladder", config.layers), 512)
    assert check_early("org/name", "ladder", 4096) is None and early_config(tmp_path) is None
    with pytest.raises(LadderError, match="more than the model's context of 512"):
        check_early(str(model), "ladder", 4096)
    with pytest.raises(LadderError, match="is wired already: name its original"):
        check_original("m", Wiring.parse("ladder", 4), "ladder", None, 512)
    with pytest.raises(LadderError, match="covers more than the model's"):
        check_pattern("ladder:99", model)
    with pytest.raises(LadderError, match="the nearest is 'ladder'"):
        check_pattern("lader", "org/name")
