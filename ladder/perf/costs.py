"""What one rank holds, reads and computes: the one place that counts a model's weights, cache and operations.
No torch here.
"""

from dataclasses import dataclass

from ladder.config import ModelConfig

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class RankCosts:
    """Of the first of `tp` ranks, which has the biases of the output projections."""

    config: ModelConfig
    tp: int
    element_bytes: int = 2  # of a weight, a key or value, and a message's element
    sharded_head: bool = True  # else every rank has the whole embedding and head

    @property
    def heads(self) -> int:
        return self.config.heads // self.tp

    @property
    def kv_heads(self) -> int:
        """Replicated where there are fewer than ranks."""
        return max(1, self.config.kv_heads // self.tp)

    @property
    def attention(self) -> int:
        """Elements of the matrices of one layer's attention."""
        return self.config.hidden * self.config.head_dim * (2 * self.heads + 2 * self.kv_heads)

    def mlp(self, rows: int | None = 1) -> float:
        """Elements of the matrices of a layer's MLP that `rows` tokens read; None: all there are. Of experts, as many
        as so many tokens are expected to choose independently; the mean of the layers with and without.
        """
        c = self.config
        dense = (2 + c.family_row.gated) * c.hidden * c.ffn // self.tp
        if c.experts is None:
            return dense
        missed = 0.0 if rows is None else (1 - c.experts.top_k / c.experts.count) ** rows
        chosen = c.experts.count * (1 - missed)
        sparse = c.experts.count * c.hidden + chosen * 3 * c.hidden * c.experts.ffn / self.tp
        return (dense * len(c.experts.dense_layers) + sparse * (c.layers - len(c.experts.dense_layers))) / c.layers

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
        return self.element_bytes * (self._layers(None) + tables)

    def cache_bytes(self, sequences: int, positions: int) -> int:
        """Keys and values."""
        return self.config.layers * int(self.layer_cache_bytes(sequences, positions))

    def layer_cache_bytes(self, sequences: int, positions: float) -> float:
        return 2 * self.element_bytes * sequences * positions * self.kv_heads * self.config.head_dim

    def step_bytes(self, batch: int, context: int) -> int:
        """What a decode step reads: every weight but the embedding, of experts the chosen ones, and keys and values."""
        return self.element_bytes * (self._layers(batch) + self.head) + self.cache_bytes(batch, context)

    def score_operations(self, pairs: float) -> float:
        """Of one layer's attention, for so many pairs of a query and a key: scores and weighted values."""
        return 4 * pairs * self.heads * self.config.head_dim

    def prompt_operations(self, batch: int, tokens: int) -> float:
        """Of all layers, for `batch` prompts of `tokens`."""
        matrices = 2 * batch * tokens * (self.attention + self.mlp())
        return self.config.layers * (matrices + self.score_operations(causal_pairs(batch, tokens)))

    def _layers(self, rows: int | None) -> int:
        """Elements of the layers and the last norm that `rows` tokens read; None: all there are."""
        return round(self.config.layers * (self.attention + self.mlp(rows))) + self.vectors


def causal_pairs(batch: int, tokens: int) -> float:
    """Pairs of a query and a key that it sees: half of the square."""
    return batch * tokens**2 / 2
