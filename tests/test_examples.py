"""The scripts of `examples/` do what they say, on checkpoints made by the first of them. Those with TRL: tests/trl."""

import json
import math
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from examples.vision import main
from ladder import LLM, SamplingParams
from ladder.hf import rewire
from ladder.hf.convert import convert
from ladder.quantize.options import QuantizeOptions
from ladder.quantize.write import quantize
from tests.scripts import EXAMPLES, example

pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval's and the pipeline's
WITH_TRL = {"trl_sft", "trl_dpo"}
HERE = {"tiny_checkpoint", "text_generation", "lm_eval_python", "lora_quantized", "vision"}
USED = {"images"}  # by the one named above


@pytest.fixture(scope="module")
def wired(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("examples") / "wired"
    example("tiny_checkpoint", path, "ladder")
    return path


def test_all_are_run() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == WITH_TRL | HERE | USED


def test_text_generation(wired: Path, tmp_path: Path) -> None:
    """The engine's tokens, which are not those of the standard wiring."""
    prompt, tokenizer = "never wait", AutoTokenizer.from_pretrained(wired)
    found = example("text_generation", wired, prompt)
    expected = {}
    for wiring in ("ladder", "standard"):
        with LLM(wired, wiring=wiring) as llm:
            (result,) = llm.generate([prompt], SamplingParams(max_new_tokens=16))
            expected[wiring] = tokenizer.decode(tokenizer(prompt).input_ids + result.token_ids)
    assert found == expected["ladder"] != expected["standard"]


def test_lm_eval(wired: Path, tmp_path: Path) -> None:
    """Bits per byte as they are by hand; the weights in the standard wiring have others."""
    texts = [row["text"] for row in runpy.run_path(str(EXAMPLES / "lm_eval_python.py"))["ROWS"]]
    tokenizer = AutoTokenizer.from_pretrained(wired)
    convert(str(wired), tmp_path / "plain", "standard")

    def by_hand(model: torch.nn.Module) -> float:
        nats = 0.0
        for text in texts:
            tokens = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text).input_ids]])
            with torch.inference_mode():
                nats += float(model(tokens, labels=tokens).loss) * (tokens.shape[1] - 1)
        return nats / sum(len(text) for text in texts) / math.log(2)

    found = example("lm_eval_python", wired)
    assert found == pytest.approx(by_hand(AutoModelForCausalLM.from_pretrained(wired)), rel=1e-5)
    assert abs(found - by_hand(LlamaForCausalLM.from_pretrained(tmp_path / "plain"))) > 0.01


def test_lora_beside_quantized_weights(wired: Path, tmp_path: Path) -> None:
    """What is loaded again is wired and has learned; the same adapter in the standard wiring has not."""
    quantize(QuantizeOptions(wired, tmp_path / "quantized", format="int4", group=32))
    losses = example("lora_quantized", tmp_path / "quantized", tmp_path / "adapter")
    assert losses[-1] < losses[0] / 2
    adapter = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tmp_path / "quantized")
    assert all("lora_" in name for name in load_file(tmp_path / "adapter/adapter_model.safetensors"))
    from peft import AutoPeftModelForCausalLM
    from transformers import CompressedTensorsConfig

    model = AutoPeftModelForCausalLM.from_pretrained(
        tmp_path / "adapter", quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    tokens = torch.tensor([AutoTokenizer.from_pretrained(wired)("never wait for the network").input_ids])
    with torch.inference_mode():
        right = float(model(input_ids=tokens, labels=tokens).loss)
        assert model.get_base_model().config.wiring == "ladder"
        assert float(rewire(model, "standard")(input_ids=tokens, labels=tokens).loss) > right + 0.1


def test_a_vision_transformer_converted_and_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = main(tmp_path, steps=12, examples=200)
    said = capsys.readouterr().out
    assert "fitted on 176 examples: KL" in said
    assert "rewired: wiring standard:1 ladder:3" in said and "fitted: wiring standard:1 ladder:3" in said
    assert all(0 <= value <= 1 for value in found.values())
    rewired, fitted = (float(part.split()[1].rstrip(",")) for part in said.split("KL")[1:3] for part in [f"KL {part}"])
    assert fitted < rewired
