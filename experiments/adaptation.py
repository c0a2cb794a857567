"""A pretrained model under other wirings: as it was, merely rewired, and adapted in several ways on equal tokens.

python -m experiments.adaptation MODEL DATA VALID TASKS WORK ARM ... [--tokens N] > results/adaptation_h200.jsonl

DATA and VALID are folders of `ladder data --tokenizer MODEL`; TASKS has the .jsonl tasks and wikitext2_test.txt. An arm
is layers and a way, as in half-distill, 27-fittext or 27:parallel-1-fittext:

    layers  half (the last), all, scanned (as many as half, those that `ladder scan --json` grows to: --scan FILE), a
            number of the last layers, or none: the original, trained as long, the control of every other arm (of the
            ways that begin with a fit it begins with the original's weights). A row after a colon: those layers under
            that row instead of ladder
    way     finetune, distill, schedule (distill, with a staleness that moves), first, last, chance (that moves in
            other ways), streams (schedule, and the original's streams), text (schedule, and the language-model loss),
            lora, side (a network beside the rewired model), fit, fittext, fitlayers and fitside (distill, text, distill
            with nothing but the rewired layers trained, and side, from what `ladder fit` makes of --fit-tokens),
            fitpolicy (fittext, the last 2% of the steps on text that the model writes)

A JSON line for the original, for each wiring without training, rewired and, for fit, fitted, and for each arm:
perplexity, KL, agreement, continuations (`ladder eval --continuations`), tasks; with --between also for weights that
went only a share of the way from the fitted to the trained ones. An arm that is in WORK already is only measured, and
what is measured there is not measured again: keep one WORK for one MODEL, DATA, VALID and TASKS. With --train-only one
process can train while another measures: of arms that are trained, or it would train them too.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.choices import scores
from ladder.bench.machine import machine
from ladder.data.shards import Shards
from ladder.hf import rewire
from ladder.hf.continuations import Continuations, prompts_of
from ladder.hf.measures import begin_of, distance, perplexity
from ladder.scan.fit import fit
from ladder.scan.options import FitOptions
from ladder.train.distill import adapt
from ladder.train.folder import finished
from ladder.train.options import OPTIMIZERS, WHOLE, AdaptOptions, TrainingOptions
from ladder.train.side import SideModel
from ladder.wiring import Wiring, canonical

TASKS = ("hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande", "lambada")
WAYS: dict[str, dict[str, Any]] = {
    "finetune": {"kl_weight": 0.0, "lm_weight": 1.0, "staleness": 0.0},
    "distill": {"staleness": 0.0},
    "schedule": {"staleness": 0.5},
    "first": {"staleness": 0.5, "staleness_way": "first"},
    "last": {"staleness": 0.5, "staleness_way": "last"},
    "chance": {"staleness": 0.5, "staleness_way": "chance"},
    "streams": {"staleness": 0.5, "hidden_weight": 1.0},
    "text": {"staleness": 0.5, "lm_weight": 0.5},
    "fit": {"staleness": 0.0},
    "fittext": {"staleness": 0.0, "lm_weight": 0.5},
    "fitpolicy": {"staleness": 0.0, "lm_weight": 0.5, "on_policy": 0.02},
    "fitlayers": {"staleness": 0.0, "method": "layers"},
    "lora": {"staleness": 0.5, "method": "lora", "lora_rank": 64},
    "side": {"staleness": 0.0, "method": "side", "reduction": 4},
    "fitside": {"staleness": 0.0, "method": "side", "reduction": 4},
}
RATES = {"finetune": 3e-4, "side": 3e-3, "fitside": 3e-3}  # elsewhere 1e-3
LAYERS = ("half", "scanned", "all", "none")  # or a number
PROMPTS, GIVEN, NEW = 256, 64, 64  # continuations: how many, and tokens of a prompt and of what is written
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "data", "valid", "tasks", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("arm", nargs="+", type=checked)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq-len", type=int, help="default: the model's context")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=OPTIMIZERS[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2, help="emulated, for rows that keep partial sums local")
    parser.add_argument("--scan", type=Path)
    parser.add_argument("--fit-tokens", type=int, default=1 << 20)
    parser.add_argument("--between", type=float, nargs="*", default=[], metavar="SHARE")
    parser.add_argument("--teacher-top", type=int, default=0, help="from a cache in WORK, which all arms share")
    parser.add_argument("--train-only", action="store_true", help="nothing is measured; the same without it measures")
    parser.add_argument("--quick", action="store_true", help="without the tasks")
    parser.add_argument("--alone", action="store_true", help="only the arms, nothing of the original and the rewired")
    given = parser.parse_args()
    others = [arm for arm in given.arm if WAYS[way_of(arm)].get("method", "full") not in WHOLE]
    if given.between and others:
        parser.error(f"--between lies between weights, and {' '.join(others)} leave them where they were")
    if not all(0 < share < 1 for share in given.between):
        parser.error("--between takes shares of the way, above 0 and below 1")
    if given.optimizer == "muon" and others:
        parser.error(f"--optimizer muon trains weights as they are, and {' '.join(others)} do not")
    if given.teacher_top and any(uncached(arm) for arm in given.arm):
        parser.error(f"--teacher-top is for ways with a KL of the text alone, not for {' '.join(given.arm)}")
    if given.train_only and given.between:
        parser.error("--train-only measures nothing: leave out --between")
    experiment = Experiment(given)
    if given.train_only:
        for arm in given.arm:
            experiment.trained(arm)
        return
    if not given.alone:
        experiment.write("original", "standard", load(given.model))
        for wiring in dict.fromkeys(experiment.wiring(arm) for arm in given.arm):
            if wiring != "standard":
                experiment.write(f"rewired {wiring}", wiring, experiment.rewired(wiring))
    for arm in given.arm:
        if is_fitted(arm):
            start, facts = experiment.fitted(arm)
            experiment.write(start.name, experiment.wiring(arm), load(start), **facts)
        out, facts = experiment.trained(arm)
        experiment.write(out.name, experiment.wiring(arm), experiment.loaded(out, arm), **facts)
        for share in given.between if is_fitted(arm) else ():
            experiment.write(
                f"{out.name} {share:g}", experiment.wiring(arm), between(start, out, share), share=share, **facts
            )


class Experiment:
    """The arms of one command line, in one folder."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._tokenizer = AutoTokenizer.from_pretrained(given.model)
        self._original = load(given.model)
        held_out = Shards.open(given.valid)
        self._held_out = held_out.read(0, min(1 << 18, held_out.tokens))
        self._written: Continuations | None = None  # the original's
        given.work.mkdir(parents=True, exist_ok=True)

    def rewired(self, wiring: str) -> Any:
        return rewire(load(self._given.model), wiring, ranks=self._ranks(wiring))

    def _ranks(self, wiring: str) -> int:
        return self._given.ranks if Wiring.parse(wiring, self._original.config.num_hidden_layers).local else 1

    def wiring(self, arm: str) -> str:
        layers, _, row = arm.removesuffix(f"-{way_of(arm)}").partition(":")
        count = self._original.config.num_hidden_layers
        if layers.isdecimal():
            if not 1 <= int(layers) <= count:
                raise SystemExit(f"{arm}: the model has {count} layers")
            return str(Wiring.parse(f"{row or 'ladder'}@{count - int(layers)}-{count - 1}", count))
        if layers == "scanned":
            if self._given.scan is None:
                raise SystemExit(f"{arm} needs --scan FILE, which `ladder scan --json` wrote")
            rows = [json.loads(line) for line in self._given.scan.read_text(encoding="utf-8").splitlines()]
            sets = [row["wiring"] for row in rows if row["kind"] == "grown" and len(row["layers"]) == -(-count // 2)]
            if not sets:
                raise SystemExit(f"{self._given.scan} has no grown set of half the layers")
            return str(sets[0])
        return {"half": f"standard:{count // 2} ladder:{-(-count // 2)}", "all": "ladder", "none": "standard"}[layers]

    def loaded(self, out: Path, arm: str) -> Any:
        if WAYS[way_of(arm)].get("method") != "side":
            return load(out)
        backbone = load(self.fitted(arm)[0]) if is_fitted(arm) else self.rewired(self.wiring(arm))
        return SideModel.load(out, backbone).to(DEVICE).eval()

    def fitted(self, arm: str) -> tuple[Path, dict[str, Any]]:
        """The folder of what an arm begins with, and how it was made."""
        given, tokens = self._given, self._given.fit_tokens
        out = given.work / f"fitted {self.wiring(arm)} {tokens}"
        taken = given.work / f"seconds {out.name}"
        if not out.exists():
            begin = time.time()
            wish = FitOptions(str(given.model), out, self.wiring(arm), given.data, tokens=tokens, dtype="float32")
            fit(wish, lambda *_: None)
            taken.write_text(f"{time.time() - begin:.1f}")
        return out, {"fit_tokens": tokens, **({"seconds": float(taken.read_text())} if taken.exists() else {})}

    def trained(self, arm: str) -> tuple[Path, dict[str, Any]]:
        """The folder of an arm's model, and how it was made."""
        given, way, wiring = self._given, way_of(arm), self.wiring(arm)
        rate = given.lr or RATES.get(way, 1e-3)
        name = f"{arm}-{given.tokens / 1e6:g}M-{rate:g}-{given.batch}-{given.optimizer}"
        name += f"-{given.fit_tokens}" * is_fitted(arm) + f"-seed{given.seed}" * (given.seed != 1)
        name += f"-by{given.seq_len}" * bool(given.seq_len) + f"-top{given.teacher_top}" * bool(given.teacher_top)
        out = given.work / name
        if not finished(out):
            begin = time.time()
            run = TrainingOptions(
                data=given.data, valid=given.valid, tokens=given.tokens, batch=given.batch, lr=rate, warmup=0.05,
                eval_every=10**9, save_every=10**9, weight_decay=0.01, optimizer=given.optimizer, seed=given.seed,
                **({"seq_len": given.seq_len} if given.seq_len else {}),
            )  # fmt: skip
            torch._dynamo.reset()  # what was compiled for other arms
            begun = self.fitted(arm)[0] if is_fitted(arm) else None
            options = adapt_options(given.model, out, wiring, way, begun, self._ranks(wiring))
            if given.teacher_top:
                shared = f"teacher {given.teacher_top} {given.tokens} {given.batch} {given.seq_len}"
                options = replace(options, teacher_top=given.teacher_top, teacher=given.work / shared)
            adapt(options, run, lambda *_: None)
            (given.work / f"seconds {out.name}").write_text(f"{time.time() - begin:.1f}")
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        speeds = sorted(line["tokens_per_s"] for line in lines if "tokens_per_s" in line)
        facts = {"tokens": given.tokens, "batch": given.batch, "lr": rate, "optimizer": given.optimizer, **WAYS[way]}
        facts |= {"seed": given.seed, "seq_len": given.seq_len or self._original.config.max_position_embeddings}
        facts |= {"teacher_top": given.teacher_top} if given.teacher_top else {}
        facts |= {"fit_tokens": given.fit_tokens} if is_fitted(arm) else {}
        facts |= {"tokens_per_s": speeds[len(speeds) // 2], "mfu": max(line.get("mfu", 0) for line in lines)}
        if (taken := given.work / f"seconds {out.name}").exists():  # not where it was stopped and continued
            facts["seconds"] = float(taken.read_text())
        return out, facts

    def write(self, name: str, wiring: str, model: Any, **facts: Any) -> None:
        kept = self._given.work / f"measured{'-quick' * self._given.quick} {name}.json"
        if not kept.exists():
            about = {"model": self._given.model.name, "data": self._given.data.name, **machine(torch.device(DEVICE))}
            kept.write_text(json.dumps({**self._measured(model), **about}), encoding="utf-8")
        found = json.loads(kept.read_text(encoding="utf-8"))
        print(json.dumps({"arm": name, "wiring": wiring, **facts, **found}), flush=True)

    def _measured(self, model: Any) -> dict[str, Any]:
        """Perplexity of two texts, KL, agreement and continuations on one of them, the tasks and their mean."""
        tasks, tokenizer = self._given.tasks, self._tokenizer
        text = tokenizer((tasks / "wikitext2_test.txt").read_text(encoding="utf-8"))["input_ids"]
        found: dict[str, Any] = {"wikitext2_perplexity": perplexity(model, text, window=1024).value}
        far = distance(model, self._original, self._held_out, window=1024)
        found |= {"valid_perplexity": far.perplexity.value, "kl": far.kl.value, "agreement": far.agreement.value}
        if self._given.quick:
            return found
        if self._written is None:
            prompts = prompts_of(self._held_out, PROMPTS, GIVEN, begin_of(tokenizer))
            self._written = Continuations(self._original, prompts, NEW, batch=PROMPTS // 2)
        for name, value in self._written.of(model)._asdict().items():
            found |= {name: value.value, f"{name}_stderr": value.stderr}
        main = []
        for task in TASKS:
            for name, value in scores(model, tokenizer, tasks / f"{task}.jsonl").items():
                found[f"{task}/{name}"] = round(value, 5)
            main.append(found.get(f"{task}/acc_norm", found[f"{task}/acc"]))
        return {**found, "tasks": round(sum(main) / len(main), 5)}


def checked(arm: str) -> str:
    """An arm of a command line."""
    layers, dash, way = arm.rpartition("-")
    count, _, row = layers.partition(":")
    if not dash or way not in WAYS or not (count.isdecimal() or (layers in LAYERS and not row)):
        raise argparse.ArgumentTypeError(
            f"{arm!r} is not LAYERS-WAY, layers of {', '.join(LAYERS)}, N or N:ROW, and a way of {', '.join(WAYS)}"
        )
    if row:
        canonical(row)
    return arm


def way_of(arm: str) -> str:
    return arm.rpartition("-")[2]


def uncached(arm: str) -> bool:
    """Whether it needs all of the original's logits or its streams, or none of them."""
    way = WAYS[way_of(arm)]
    return bool(way.get("hidden_weight") or way.get("on_policy")) or way.get("kl_weight") == 0.0


def is_fitted(arm: str) -> bool:
    """Whether it begins with what `ladder fit` makes."""
    return way_of(arm).startswith("fit") and not arm.startswith("none-")


def adapt_options(model: Path, out: Path, wiring: str, way: str, begun: Path | None, ranks: int = 1) -> AdaptOptions:
    """Everything that decides a way is said, whatever the defaults of `ladder adapt` are."""
    said = {"kl_weight": 1.0, "lm_weight": 0.0, "fit_tokens": 0, **WAYS[way]}
    return AdaptOptions(str(model), out, wiring, init_from=begun, ranks=ranks, **said)


def between(start: Path, end: Path, share: float) -> Any:
    """A model whose weights have gone a share of the way from one folder's to another's."""
    model = load(start)
    for weight, other in zip(model.parameters(), load(end).parameters(), strict=True):
        weight.data.copy_(torch.lerp(weight.data.float(), other.data.float(), share))
    return model


def load(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(DEVICE).eval()


if __name__ == "__main__":
    main()
