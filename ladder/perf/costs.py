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

    @property
    def mlp(self) -> int:
        """Elements of the matrices of one layer's MLP."""
        return 3 * self.config.hidden * self.config.ffn // self.tp

    @property
    def vectors(self) -> int:
        """Elements of all norms and biases."""
        c = self.config
        layer = 2 * c.hidden + 2 * c.head_dim * c.qk_norm
        layer += c.qkv_bias * c.head_dim * (self.heads + 2 * self.kv_heads) + c.o_bias * c.hidden
        layer += c.mlp_bias * (2 * c.ffn // self.tp + c.hidden)
        return c.layers * layer + c.hidden

    @property
    def head(self) -> int:
        """Elements of the head, which has as many as the embedding."""
        return self.config.hidden * (-(-self.config.vocab // self.tp) if self.sharded_head else self.config.vocab)

    @property
    def weight_bytes(self) -> int:
        tables = self.head * (1 if self.config.tied else 2)
        return self.element_bytes * (self._layers + tables)

    def cache_bytes(self, sequences: int, positions: int) -> int:
        """Keys and values."""
        return self.config.layers * int(self.layer_cache_bytes(sequences, positions))

    def layer_cache_bytes(self, sequences: int, positions: float) -> float:
        return 2 * self.element_bytes * sequences * positions * self.kv_heads * self.config.head_dim

    def step_bytes(self, batch: int, context: int) -> int:
        """What a decode step cannot avoid to read: every weight but the embedding, and the keys and values."""
        return self.element_bytes * (self._layers + self.head) + self.cache_bytes(batch, context)

    def score_operations(self, pairs: float) -> float:
        """Of one layer's attention, for so many pairs of a query and a key: scores and weighted values."""
        return 4 * pairs * self.heads * self.config.head_dim

    def prompt_operations(self, batch: int, tokens: int) -> float:
        """Of all layers, for `batch` prompts of `tokens`."""
        matrices = 2 * batch * tokens * (self.attention + self.mlp)
        return self.config.layers * (matrices + self.score_operations(causal_pairs(batch, tokens)))

    @property
    def _layers(self) -> int:
        """Elements of the layers and the last norm."""
        return self.config.layers * (self.attention + self.mlp) + self.vectors


def causal_pairs(batch: int, tokens: int) -> float:
    """Pairs of a query and a key that it sees: half of the square."""
    return batch * tokens**2 / 2
