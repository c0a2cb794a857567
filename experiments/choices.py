"""Multiple-choice tasks and last words, scored as EleutherAI's harness does, on one GPU in seconds.

Rows are those of `ladder eval --task FILE.jsonl`; that verb needs lm-eval, this needs nothing. A choice is scored as
" " + choice after the query, tokenized together with it; where lengths matter, by its length in characters.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ladder.train.side import SideModel

AT_ONCE = 65_536  # tokens of a pass, padding included


def scores(model: Any, tokenizer: Any, file: Path) -> dict[str, float]:
    """What share of a file's rows is answered right: acc, acc_norm where there are choices, and perplexity of words."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    pairs = [pair for row in rows for pair in _pairs(row)]
    found = _likelihoods(model, tokenizer, pairs)
    if "choices" not in rows[0] and "contexts" not in rows[0]:
        surprise = -sum(log for log, _ in found) / len(found)
        return {
            "acc": sum(greedy for _, greedy in found) / len(found),
            "perplexity": float(torch.tensor(surprise).exp()),
        }
    right = {"acc": 0, "acc_norm": 0}
    at = 0
    for row in rows:
        count = len(row["choices"] if "choices" in row else row["contexts"])
        logs = [log for log, _ in found[at : at + count]]
        lengths = [len(choice) for choice in row.get("choices", [""] * count)]
        right["acc"] += max(range(count), key=lambda i: logs[i]) == row["gold"]
        right["acc_norm"] += max(range(count), key=lambda i: logs[i] / max(1, lengths[i])) == row["gold"]
        at += count
    return {name: hits / len(rows) for name, hits in right.items() if name == "acc" or "choices" in rows[0]}


def _pairs(row: dict[str, Any]) -> list[tuple[str, str]]:
    """(context, what continues it), all of a row's."""
    if "choices" in row:
        return [(row["query"], " " + choice) for choice in row["choices"]]
    if "contexts" in row:
        return [(context, " " + row["continuation"]) for context in row["contexts"]]
    return [(row["context"], " " + row["continuation"])]


@torch.inference_mode()
def _likelihoods(model: Any, tokenizer: Any, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    """Of each continuation: its log-probability, and whether greedy decoding gives it."""
    contexts = tokenizer([context for context, _ in pairs])["input_ids"]
    wholes = tokenizer([context + more for context, more in pairs])["input_ids"]
    order = sorted(range(len(pairs)), key=lambda i: -len(wholes[i]))
    found: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
    at = 0
    while at < len(order):
        longest = -(-len(wholes[order[at]]) // 32) * 32
        some = order[at : at + max(1, AT_ONCE // longest)]
        at += len(some)
        tokens = torch.zeros(len(some), longest, dtype=torch.long)
        for line, i in enumerate(some):
            tokens[line, : len(wholes[i])] = torch.tensor(wholes[i])
        there = tokens.to(model.device)
        if isinstance(model, SideModel):  # whose head reads two streams
            states, head = model(input_ids=there, use_cache=False).logits, torch.nn.Identity()
        else:
            states = model.base_model(input_ids=there, use_cache=False).last_hidden_state
            head = model.get_output_embeddings()
        spans = [(len(contexts[i]), len(wholes[i])) for i in some]
        logits: Tensor = head(torch.cat([states[line, a - 1 : b - 1] for line, (a, b) in enumerate(spans)])).float()
        targets = torch.cat([there[line, a:b] for line, (a, b) in enumerate(spans)])
        logs, hits = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0], logits.argmax(-1) == targets
        counts = [b - a for a, b in spans]
        for i, log, hit in zip(some, logs.cpu().split(counts), hits.cpu().split(counts), strict=True):
            found[i] = (float(log.sum()), bool(hit.all()))
    return found
