"""Directories in, directories out: exact, lazy, each byte once, and loud where something does not fit."""

import json
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ladder.checkpoint import INDEX, SINGLE, Directory, Random, load, save
from ladder.comm.base import Comm, RankOnly
from ladder.comm.emulated import World
from ladder.config import Experts, ModelConfig
from ladder.errors import LadderError
from ladder.model import Decoder
from tests.families import FAMILIES, make

TINY = ModelConfig.named("tiny")


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


def saved(directory: Path, config: ModelConfig = TINY, **options: int) -> Path:
    save(load(Decoder(config), Random()), directory, **options)
    return directory


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wiring", ["standard", "standard:2 ladder-1-2:2"])
def test_save_load_save_is_byte_identical(family: str, wiring: str, tmp_path: Path) -> None:
    make(family, tmp_path / "theirs")
    for begin, out in (("theirs", "first"), ("first", "second")):
        source = Directory(tmp_path / begin)
        save(load(Decoder(source.config.rewired(wiring)), source), tmp_path / out, file_bytes=40_000)
    assert contents(tmp_path / "first") == contents(tmp_path / "second")
    assert INDEX in contents(tmp_path / "first")
    theirs = load_file(tmp_path / "theirs" / SINGLE)
    ours = {k: v for file in (tmp_path / "second").glob("*.safetensors") for k, v in load_file(file).items()}
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_many_files_and_one_file_hold_the_same_model(tmp_path: Path) -> None:
    one, many = saved(tmp_path / "one"), saved(tmp_path / "many", file_bytes=30_000)
    assert len(list(many.glob("*.safetensors"))) > 3
    tokens = torch.arange(12).view(1, 12)
    assert torch.equal(load(Decoder(TINY), Directory(one))(tokens), load(Decoder(TINY), Directory(many))(tokens))


class Counting(Directory):
    """Counts how often each element of each tensor is read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reads: dict[str, Tensor] = {}

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> Tensor:
        piece = super().read(name, shape, index)
        self.reads.setdefault(name, torch.zeros(shape, dtype=torch.int32))[index] += 1
        assert piece.shape == self.reads[name][index].shape  # no more than it asked for
        return piece


@pytest.mark.parametrize("size", [2, 4, 8])
def test_each_byte_of_a_sharded_tensor_is_read_once_in_all(size: int, tmp_path: Path) -> None:
    source = Counting(saved(tmp_path, replace(TINY, vocab=321, tied=True)))
    with World(size) as world:  # a lock-free counter: ranks load one after the other
        for comm in world.ranks:
            load(Decoder(source.config, comm), source)
    for name, reads in source.reads.items():
        replicated = "norm" in name
        copies = size // source.config.kv_heads if size > source.config.kv_heads else 1
        times = size if replicated else copies if "k_proj" in name or "v_proj" in name else 1
        assert bool((reads == times).all()), name
    assert source.reads.keys() == load_file(tmp_path / SINGLE).keys()


class Watching(Directory):
    """Sees to it that what was read is gone, mapping and all, before the next is read; keeps the pieces' sizes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.sizes: list[int] = []
        self._last: Callable[[], Tensor | None] = lambda: None

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> Tensor:
        self.assert_nothing_is_left()
        piece = super().read(name, shape, index)
        self._last = weakref.ref(piece)
        self.sizes.append(piece.numel())
        return piece

    def assert_nothing_is_left(self) -> None:
        assert self._last() is None and str(self.path) not in Path("/proc/self/maps").read_text()


class Allocating(TorchDispatchMode):
    """Keeps the largest tensor that any operation makes anew, in bytes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        old = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for made in tree_leaves(out):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in old:
                self.largest = max(self.largest, made.numel() * made.element_size())
        return out


@pytest.mark.parametrize("size", [1, 2, 4])
def test_loading_takes_the_shard_and_one_piece_at_a_time(size: int, tmp_path: Path) -> None:
    """What a rank reads are its slices; one is in memory at a time, its file mapped no longer; nothing else is made."""
    source = Watching(saved(tmp_path, file_bytes=100_000))
    for rank in range(size):
        source.sizes.clear()
        model = Decoder(source.config, RankOnly(rank, size))
        with Allocating() as seen:
            load(model, source)
        source.assert_nothing_is_left()
        assert source.sizes == [shard.target.numel() for shard in model.shards()]
        assert seen.largest <= 4 * max(source.sizes)


def test_the_watch_over_loading_can_fail(tmp_path: Path) -> None:
    source = Watching(saved(tmp_path))
    shards = list(Decoder(source.config).shards())[:2]
    kept = source.read(shards[0].name, shards[0].shape, shards[0].index)
    with pytest.raises(AssertionError):
        source.read(shards[1].name, shards[1].shape, shards[1].index)
    with Allocating() as seen:
        kept.clone()
    assert seen.largest == 4 * kept.numel()


def test_dtype_is_converted_on_the_way(tmp_path: Path) -> None:
    source = Directory(saved(tmp_path))
    exact, half = load(Decoder(TINY), source), load(Decoder(TINY, dtype=torch.bfloat16), source)
    for a, b in zip(exact.shards(), half.shards(), strict=True):
        assert b.target.dtype == torch.bfloat16 and torch.equal(a.target.bfloat16(), b.target)


@pytest.mark.parametrize("value, wiring", [(3, "standard:1 ladder:3"), ([0, 2], "ladder@0,2"), (0, "standard")])
def test_the_papers_key(value: object, wiring: str, tmp_path: Path) -> None:
    saved(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "ladder_layers": value}))
    config = Directory(tmp_path).config
    assert config == replace(TINY.rewired(wiring))
    assert config.rewired("parallel").wiring == TINY.rewired("parallel").wiring  # any wiring, on request


def test_saving_over_weights_or_from_one_of_several_ranks_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(LadderError, match="already holds weights"):
        saved(tmp_path)

    def write(comm: Comm) -> None:
        save(load(Decoder(TINY, comm), Random()), tmp_path / "other")

    with World(2) as world, pytest.raises(LadderError, match="one of 2"):
        world.run(write)


def broken_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def broken_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])


def without_a_tensor(path: Path) -> None:
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path)


def with_a_wrong_shape(path: Path) -> None:
    save_file({**load_file(path), "model.norm.weight": torch.zeros(63)}, path)


def with_integers(path: Path) -> None:
    save_file({**load_file(path), "model.norm.weight": torch.zeros(64, dtype=torch.int32)}, path)


SPOILED = {
    broken_file: "truncated or corrupted",
    broken_header: "truncated or corrupted",
    without_a_tensor: "lacks the tensor 'model.norm.weight'",
    with_a_wrong_shape: r"'model.norm.weight' has shape \[63\], its config.json calls for \[64\]",
    with_integers: "has type I32",
    Path.unlink: "has neither",
}


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_a_spoiled_file_is_refused_before_weights_are_read(spoil: object, tmp_path: Path) -> None:
    saved(tmp_path)
    spoil(tmp_path / SINGLE)  # type: ignore[operator]
    with pytest.raises(LadderError, match=SPOILED[spoil]) as caught:  # type: ignore[index]
        source = Directory(tmp_path)
        source.check(Decoder(source.config, device="meta").shards())
    assert "\n" not in str(caught.value)


def test_a_missing_part_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, file_bytes=30_000)
    (tmp_path / "model-00002-of-00009.safetensors").unlink(missing_ok=True)
    parts = sorted(tmp_path.glob("*.safetensors"))
    parts[1].unlink()
    with pytest.raises(LadderError, match=f"no such file: .*{parts[1].name}"):
        Directory(tmp_path)


@pytest.mark.parametrize(
    "change", [{"ffn": 64}, {"hidden": 32, "head_dim": 8}, {"heads": 4, "head_dim": 8}, {"vocab": 300}]
)
def test_load_itself_refuses_what_does_not_fit(change: dict[str, int], tmp_path: Path) -> None:
    source = Directory(saved(tmp_path))
    with pytest.raises(LadderError, match="has shape"):
        load(Decoder(replace(TINY, **change)), source)  # type: ignore[arg-type]


def test_more_than_the_model_has_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    save_file({**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, tmp_path / SINGLE)
    with pytest.raises(LadderError, match=r"has the tensor 'model.layers.0.self_attn.q_proj.bias'"):
        source = Directory(tmp_path)
        source.check(Decoder(source.config, device="meta").shards())
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, tmp_path / SINGLE)
    Directory(tmp_path).check(Decoder(TINY, device="meta").shards())
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 3}))
    with pytest.raises(LadderError, match="calls for 3 layers, the files have 4"):
        Directory(tmp_path)


def test_a_head_in_the_files_is_used_even_if_the_config_ties_it(tmp_path: Path) -> None:
    """As transformers does."""
    from transformers import AutoModelForCausalLM

    saved(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": True}))
    source, tokens = Directory(tmp_path), torch.arange(9).view(1, 9)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        ours = load(Decoder(source.config), source)(tokens)
        assert (ours - theirs(tokens).logits).abs().max() < 1e-4


def test_a_configuration_that_no_config_json_can_say_is_not_saved(tmp_path: Path) -> None:
    for change in ({"windows": (3,) * 4}, {"qkv_bias": True}, {"family": "mistral", "windows": (3, 4, 3, 3)}):
        config = replace(TINY, **change)  # type: ignore[arg-type]
        with pytest.raises(LadderError, match=r"config\.json can say"):
            saved(tmp_path / str(len(change)), config)
    assert not any(tmp_path.rglob("*.safetensors"))


def test_progress_adds_up(tmp_path: Path) -> None:
    told: list[int] = []
    model = load(Decoder(TINY), Directory(saved(tmp_path)), progress=told.append)
    assert sum(told) == sum(s.target.numel() * 4 for s in model.shards()) and len(told) > 10


def test_values_that_are_not_finite_are_refused_on_request(tmp_path: Path) -> None:
    saved(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, tmp_path / SINGLE)
    load(Decoder(TINY), Directory(tmp_path))
    with pytest.raises(LadderError, match=r"model.layers.1.mlp.up_proj.weight.*not finite"):
        load(Decoder(TINY), Directory(tmp_path), check=True)


def test_random_weights_do_not_depend_on_the_degree() -> None:
    whole = {shard.name: shard.target for shard in load(Decoder(TINY), Random()).shards()}
    found: dict[str, int] = defaultdict(int)
    with World(4) as world:
        for comm in world.ranks:
            for shard in load(Decoder(TINY, comm), Random()).shards():
                assert torch.equal(shard.target, whole[shard.name][shard.index])
                found[shard.name] += 1
    assert set(found.values()) == {4} and found.keys() == whole.keys()


def test_ranks_that_are_threads_read_from_one_source() -> None:
    """Another thread reads another tensor while this one looks whether it has just read the same."""
    source, whole = Random(), (slice(None),)

    class Interrupted(tuple[int, ...]):
        def __eq__(self, other: object) -> bool:
            source.read("another", (3,), whole)
            return super().__eq__(other)

        __hash__ = tuple.__hash__

    expected = source.read("first", (2,), whole)
    assert torch.equal(source.read("first", Interrupted((2,)), whole), expected)


def test_names_without_the_base_model(tmp_path: Path) -> None:
    """As GPT-2 is published: transformers reads such files, too."""
    theirs = make("gpt2", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    buffers = {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    bare = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    save_file({**bare, **buffers}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = Directory(tmp_path)
    source.check(Decoder(source.config).shards())
    tokens = torch.tensor([[5, 17, 9]])
    with torch.inference_mode():
        ours, expected = load(Decoder(source.config), source)(tokens), theirs(tokens).logits
    assert (ours - expected).abs().max() <= 1e-4


def test_the_first_layers_of_a_model() -> None:
    """What is said of single layers is cut, too."""
    experts = Experts(4, 2, 8, dense_layers=(1, 3))
    whole = ModelConfig(
        16, 4, 2, 2, 8, 16, family="qwen3_moe", experts=experts, no_rope=(0, 2), windows=(3, None, 3, 4)
    )
    first = whole.first(2)
    assert first.experts is not None and first.experts.dense_layers == (1,)
    assert first.no_rope == (0,) and first.windows == (3, None)
