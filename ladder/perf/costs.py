"""What one rank holds, reads and computes: the one place that counts a model's weights, cache and operations.
No torch here.
"""

from dataclasses import dataclass

from ladder.config import ModelConfig
from ladder.config.quantization import DENSE, GROUPS, Storage
from ladder.errors import LadderError

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
SCALE_BYTES = 4  # of 8-bit weights; those of int4 are in the model's dtype


@dataclass(frozen=True)
class RankCosts:
    """Of the first of `tp` ranks, which has the biases of the output projections."""

    config: ModelConfig
    tp: int
    element_bytes: int = 2  # of a weight that is not quantized, a key or value, and a message's element
    sharded_head: bool = True  # else every rank has the whole embedding and head

    @property
    def heads(self) -> int:
        return self.config.heads // self.tp

    @property
    def kv_heads(self) -> int:
        """Replicated where there are fewer than ranks."""
        return max(1, self.config.kv_heads // self.tp)

    @property
    def storage(self) -> Storage:
        """How the matrices of the layers are stored: all alike."""
        names = self.config.names
        return self.config.weights.of(f"{names.layers}.0.{names.o}")

    @property
    def attention(self) -> int:
        """Elements of the matrices of one layer's attention."""
        return sum(outputs * inputs for outputs, inputs in self._attention)

    @property
    def attention_bytes(self) -> int:
        return sum(stored_bytes(self.storage, *shape, self.element_bytes) for shape in self._attention)

    @property
    def _attention(self) -> tuple[tuple[int, int], ...]:
        """[outputs, inputs] of each matrix of an attention."""
        c = self.config
        return ((self.heads + 2 * self.kv_heads) * c.head_dim, c.hidden), (c.hidden, self.heads * c.head_dim)

    def mlp(self, rows: int | None = 1) -> float:
        """Elements of the matrices of a layer's MLP that `rows` tokens read; None: all there are. Of experts, as many
        as so many tokens are expected to choose independently; the mean of the layers with and without.
        """
        return self._mlp(rows, DENSE, 1)

    def mlp_bytes(self, rows: int | None = 1) -> float:
        """The same in bytes."""
        return self._mlp(rows, self.storage, self.element_bytes)

    @property
    def bytes_per_weight(self) -> float:
        """Of the layers' matrices, scales and zeros included."""
        return (self.attention_bytes + self.mlp_bytes(None)) / (self.attention + self.mlp(None))

    def _mlp(self, rows: int | None, storage: Storage, element_bytes: int) -> float:
        c = self.config
        dense = sum(stored_bytes(storage, *shape, element_bytes) for shape in self._mlp_shapes(c.ffn))
        if c.experts is None:
            return dense
        expert = sum(stored_bytes(storage, *shape, element_bytes) for shape in self._mlp_shapes(c.experts.ffn))
        missed = 0.0 if rows is None else (1 - c.experts.top_k / c.experts.count) ** rows
        chosen, router = c.experts.count * (1 - missed), element_bytes * c.experts.count * c.hidden
        dense_layers = len(c.experts.dense_layers)
        return (dense * dense_layers + (router + chosen * expert) * (c.layers - dense_layers)) / c.layers

    def _mlp_shapes(self, ffn: int) -> tuple[tuple[int, int], ...]:
        """[outputs, inputs] of each matrix of an MLP or an expert of that inner width."""
        width = ffn // self.tp
        return ((1 + self.config.family_row.gated) * width, self.config.hidden), (self.config.hidden, width)

    def check_groups(self) -> None:
        """Refuse int4 where a matrix's inputs are no whole number of groups."""
        c = self.config
        inner = [c.ffn] if c.experts is None or c.experts.dense_layers else []
        inner += [] if c.experts is None else [c.experts.ffn]
        shapes = [*self._attention, *(shape for ffn in inner for shape in self._mlp_shapes(ffn))]
        for _, inputs in shapes if self.storage.kind == "int4" else ():
            if inputs % self.storage.unit:
                fits = [str(group) for group in GROUPS if not any(width % group for _, width in shapes)]
                works = f"groups of {' or '.join(fits)} can be" if fits else "no groups can be"
                raise LadderError(f"{inputs} inputs of a rank's matrix cannot be stored as {self.storage}: {works}")

    @property
    def inward_shares(self) -> tuple[float, float]:
        """Of an attention's and of an MLP's elements, the share of the first products, which read the stream."""
        inward, gates = self.heads + 2 * self.kv_heads, 1 + self.config.family_row.gated
        return inward / (inward + self.heads), gates / (1 + gates)

    @property
    def vectors(self) -> int:
        """Elements of all norms, biases and learned positions."""
        c = self.config
        names, norm = c.names, c.hidden * (1 + c.family_row.layer_norm)
        norms = [names.attention_norm, names.attention_post_norm, names.mlp_norm, names.mlp_post_norm]
        layer = norm * len({name for name in norms if name is not None})
        heads = c.head_dim * (self.heads + self.kv_heads)
        layer += {"": 0, "head": 2 * c.head_dim, "all": heads}[c.family_row.qk_norm]
        layer += c.qkv_bias * (heads + c.head_dim * self.kv_heads) + c.o_bias * c.hidden
        layer += c.mlp_bias * ((1 + c.family_row.gated) * c.ffn // self.tp + c.hidden)
        return c.layers * layer + norm + (0 if names.positions is None else c.context * c.hidden)

    @property
    def head(self) -> int:
        """Elements of the head, which has as many as the embedding."""
        return self.config.hidden * (-(-self.config.vocab // self.tp) if self.sharded_head else self.config.vocab)

    @property
    def weight_bytes(self) -> int:
        tables = self.head * (1 if self.config.tied else 2)
        return self._layers(None) + self.element_bytes * tables

    def cache_bytes(self, sequences: int, positions: int) -> int:
        """Keys and values."""
        return self.config.layers * int(self.layer_cache_bytes(sequences, positions))

    def layer_cache_bytes(self, sequences: int, positions: float) -> float:
        return 2 * self.element_bytes * sequences * positions * self.kv_heads * self.config.head_dim

    def step_bytes(self, batch: int, context: int) -> int:
        """What a decode step reads: every weight but the embedding, of experts the chosen ones, and keys and values."""
        return self._layers(batch) + self.element_bytes * self.head + self.cache_bytes(batch, context)

    def score_operations(self, pairs: float) -> float:
        """Of one layer's attention, for so many pairs of a query and a key: scores and weighted values."""
        return 4 * pairs * self.heads * self.config.head_dim

    def prompt_operations(self, batch: int, tokens: int) -> float:
        """Of all layers, for `batch` prompts of `tokens`."""
        matrices = 2 * batch * tokens * (self.attention + self.mlp())
        return self.config.layers * (matrices + self.score_operations(causal_pairs(batch, tokens)))

    def _layers(self, rows: int | None) -> int:
        """Bytes of the layers and the last norm that `rows` tokens read; None: all there are."""
        matrices = self.config.layers * (self.attention_bytes + self.mlp_bytes(rows))
        return round(matrices) + self.element_bytes * self.vectors


def stored_bytes(storage: Storage, outputs: int, inputs: int, element_bytes: int) -> int:
    """Of a matrix in memory, `layers/quantized.py`: every output has its own scale of each group, also where a
    checkpoint has one for many outputs.
    """
    if storage == DENSE:
        return outputs * inputs * element_bytes
    four, groups = storage.kind == "int4", -(-inputs // storage.group) if storage.group else 1
    scale = (element_bytes if four else SCALE_BYTES) + storage.zero
    return outputs * ((inputs // 2 if four else inputs) + scale * groups)


def causal_pairs(batch: int, tokens: int) -> float:
    """Pairs of a query and a key that it sees: half of the square."""
    return batch * tokens**2 / 2
