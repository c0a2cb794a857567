"""EleutherAI's lm-eval: tasks by name, from YAML files and from JSON lines; the one place that imports it."""

import importlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from io import StringIO
from math import exp
from pathlib import Path
from typing import Any

import torch

from ladder.errors import LadderError, install
from ladder.hf.load import quiet, reason
from ladder.hf.measures import Estimate, read
from ladder.progress import Progress

_SEED = 1234  # lm-eval's own, for the choice of shots

# A line's keys -> lm-eval's output_type, text, choices, target, delimiter before the target, metrics. Where the text is
# a number, lm-eval takes the choices as contexts, and the target as the continuation of each. Without choices it puts
# nothing before the target: the lines get their space here.
_FORMS: dict[tuple[str, ...], tuple[str, str, str | None, str, str, tuple[str, ...]]] = {
    ("query", "choices", "gold"): ("multiple_choice", "query", "choices", "gold", " ", ("acc", "acc_norm")),
    ("contexts", "continuation", "gold"): ("multiple_choice", "gold", "contexts", "continuation", " ", ("acc",)),
    ("context", "continuation"): ("loglikelihood", "context", None, "continuation", "", ("acc", "perplexity")),
}
_FIELDS = ("output_type", "doc_to_text", "doc_to_choice", "doc_to_target", "target_delimiter", "metric_list")


class Harness:
    """Loaded tasks, to be run with one model after the other."""

    def __init__(self, specs: Sequence[str | Path], tasks_dir: str | Path | None, shots: int | None) -> None:
        given = [task_of_rows(Path(spec)) if str(spec).endswith(".jsonl") else str(spec) for spec in specs]
        try:
            self._evaluate = importlib.import_module("lm_eval.evaluator").evaluate
            self._manager = importlib.import_module("lm_eval.tasks").TaskManager
            metrics = importlib.import_module("lm_eval.api.metrics")
            self._wrap = without_bars(importlib.import_module("lm_eval.models.huggingface").HFLM)
            self._datasets = importlib.import_module("datasets")
        except ImportError as error:
            raise LadderError(f"tasks need lm-eval ({error}): {install('eval')}") from None
        self._mean, self._perplexity = metrics.mean, metrics.perplexity
        self.tasks, self.groups = dict[str, Any](), dict[str, Any]()
        with self._quiet():
            manager = self._index([spec for spec in given if isinstance(spec, str)], tasks_dir)
            for spec in given:
                self._add(manager, spec)
        for task in self.tasks.values():
            own = task.get_config("num_fewshot")
            if own != 0:  # lm-eval's rule: a task that says 0 means it
                task.set_config(key="num_fewshot", value=(own or 0) if shots is None else shots)
            task.set_fewshot_seed(seed=_SEED)
            task.build_all_requests = _without_stderr(task.build_all_requests)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """No progress bars and messages of lm-eval and datasets, no request that counts downloads; then as before."""
        settings = self._datasets.config
        with quiet("lm_eval", "datasets"), ExitStack() as stack:
            stack.callback(setattr, settings, "HF_UPDATE_DOWNLOAD_COUNTS", settings.HF_UPDATE_DOWNLOAD_COUNTS)
            settings.HF_UPDATE_DOWNLOAD_COUNTS = False  # it would ask the network even for a local file
            if not self._datasets.are_progress_bars_disabled():
                stack.callback(self._datasets.enable_progress_bars)
                self._datasets.disable_progress_bars()
            yield

    def _index(self, names: list[str], tasks_dir: str | Path | None) -> Any:
        """The index of task names. lm-eval's own is thousands of files: it is read only for names that are not in
        `tasks_dir`.
        """
        if tasks_dir is not None and not Path(tasks_dir).is_dir():
            raise LadderError(f"no such directory of tasks: {tasks_dir}")
        files = [Path(name) for name in names if name.endswith((".yaml", ".yml"))]
        texts = [read(file) for file in files]
        names = [name for name in names if Path(name) not in files]
        manager = self._manager(include_path=tasks_dir, include_defaults=False)
        grouped = any("group" in (entry.cfg or {}) for entry in manager.task_index.values())
        grouped |= any(re.search(r"^group\s*:", words, re.M) for words in texts)
        if grouped or any(name not in manager.task_index for name in names):
            manager = self._manager(include_path=tasks_dir)
        for name in names:
            if name not in manager.task_index:
                near = ", ".join(get_close_matches(name, manager.all_tasks)) or "none"
                raise LadderError(f"unknown task {name!r}: similar ones are {near}; a file ends in .yaml or .jsonl")
        return manager

    def _add(self, manager: Any, spec: str | dict[str, Any]) -> None:
        name = spec if isinstance(spec, str) else spec["task"]
        try:
            loaded = manager.load([spec])
        except Exception as error:  # whatever is in the file, or the network
            raise LadderError(f"the task {name} cannot be loaded: {reason(error)}") from error
        for each, task in loaded["tasks"].items():
            if each in self.tasks:
                raise LadderError(f"two tasks are called {each}: name it once, or rename one")
            if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                raise LadderError(f"the task {each} runs code or needs more than text: it is not supported")
            self.tasks[each] = task
        self.groups |= loaded.get("groups", {})

    def run(
        self, label: str, tokenizer: Any, model: Any, batch: int, limit: int | None, progress: Progress
    ) -> dict[str, Estimate]:
        """Every task with one model."""
        options = dict[str, Any]()
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            options["prefix_token_id"] = 0  # lm-eval must have one, for texts that continue nothing
            tokenizer.pad_token = tokenizer.pad_token or tokenizer.convert_ids_to_tokens(0)
        precise = torch.promote_types(model.dtype, torch.float32)
        options |= {"backend": "causal", "tokenizer": tokenizer, "batch_size": batch, "softmax_dtype": precise}
        with self._quiet():
            return self._run(label, self._wrap(pretrained=model, **options), limit, progress)

    def run_with(self, label: str, model: Any, limit: int | None, progress: Progress) -> dict[str, Estimate]:
        """Every task with a model of lm-eval's own classes."""
        with self._quiet():
            return self._run(label, model, limit, progress)

    def _run(self, label: str, model: Any, limit: int | None, progress: Progress) -> dict[str, Estimate]:
        found: dict[str, Estimate] = {}
        summary: dict[str, dict[str, Any]] = {}  # what a group is computed from
        for name, task in self.tasks.items():
            model.set_cache_hook(_ProgressHook(task, progress, f"{label}: {name}"))
            result = self._evaluate(lm=model, task_dict={"tasks": {name: task}}, limit=limit, bootstrap_iters=0)
            summary[name] = dict(result["results"][name], sample_len=result["n-samples"][name]["effective"])
            for metric, chosen, measure in _metrics(name, result["results"][name]):
                items = [row[metric] for row in result["samples"][name] if row["filter"] == chosen and metric in row]
                estimate = self._estimate(items, task.aggregation().get(metric, self._mean))
                found[measure] = estimate
                summary[name][f"{metric}_stderr,{chosen}"] = "N/A" if estimate.stderr is None else estimate.stderr
        for name, group in self.groups.items():
            whole = group.aggregate(summary)
            for metric, chosen, measure in _metrics(name, whole):
                value, error = (whole.get(f"{metric}{kind},{chosen}") for kind in ("", "_stderr"))
                found[measure] = Estimate(float(value), error if error != "N/A" else None, int(whole["sample_len"]))
        return found

    def _estimate(self, items: list[Any], aggregate: Any) -> Estimate:
        if aggregate not in (self._mean, self._perplexity):
            with warnings.catch_warnings():  # sklearn's, about parts of the items that lack a label
                warnings.filterwarnings("ignore", "A single label was found|.* is ill-defined", UserWarning)
                return Estimate.jackknife(items, aggregate)
        mean = Estimate.mean(items)
        return mean if aggregate is self._mean else mean.through(lambda at: exp(-at), -exp(-mean.value))


def without_bars(model: Any) -> Any:
    """lm-eval's model class with its progress bars off: `evaluate` has no option for that, the methods have."""

    def silent(method: Any) -> Any:
        @wraps(method)
        def call(self: Any, requests: Any, **options: Any) -> Any:
            return method(self, requests, **{**options, "disable_tqdm": True})

        return call

    names = ("loglikelihood", "loglikelihood_rolling", "generate_until", "_loglikelihood_tokens")
    return type(model.__name__, (model,), {name: silent(getattr(model, name)) for name in names})


def _without_stderr(build: Any) -> Any:
    """A task's method that builds its requests, whose progress bar has no switch."""

    @wraps(build)
    def call(**options: Any) -> None:
        with redirect_stderr(StringIO()):
            build(**options)

    return call


@dataclass
class _ProgressHook:
    """In the place of lm-eval's cache, which is called with every answer: it reports the progress."""

    task: Any
    progress: Progress
    what: str
    done: int = 0

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        self.done += 1
        self.progress(self.done, max(self.done, len(self.task.instances)), self.what)


def _metrics(task: str, scores: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(metric, filter, our name for it) of what lm-eval found."""
    split = [key.partition(",") for key in scores]
    pairs = [(metric, chosen) for metric, comma, chosen in split if comma and not metric.endswith("_stderr")]
    return [(metric, chosen, f"{task}/{metric}" + f",{chosen}" * (chosen != "none")) for metric, chosen in pairs]


def task_of_rows(path: Path) -> dict[str, Any]:
    """lm-eval's task for a file of JSON lines. They stay in memory: lm-eval's own loader asks the network and fills a
    cache.
    """
    rows = []
    keys: tuple[str, ...] | None = None
    for number, line in enumerate(read(path).splitlines(), 1):
        if line.strip():
            row, form = _row(line, f"{path}, line {number}")
            if keys is not None and form != keys:
                raise LadderError(
                    f"{path}, line {number}: has {', '.join(form)}, the lines before have {', '.join(keys)}"
                )
            keys = form
            rows.append(row)
    assert keys is not None

    def dataset(**_: Any) -> dict[str, Any]:
        return {"test": importlib.import_module("datasets").Dataset.from_list(rows)}

    task: dict[str, Any] = dict(zip(_FIELDS, _FORMS[keys], strict=True))
    task["metric_list"] = [
        {"metric": name, "aggregation": name if name == "perplexity" else "mean", "higher_is_better": name[:3] == "acc"}
        for name in _FORMS[keys][-1]
    ]
    return {**task, "task": path.stem, "custom_dataset": dataset, "test_split": "test", "fewshot_split": "test"}


def _row(line: str, where: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    try:
        given = json.loads(line)
    except json.JSONDecodeError as error:
        raise LadderError(f"{where}: not JSON: {error}") from None
    form = next((keys for keys in _FORMS if isinstance(given, dict) and given.keys() >= set(keys)), None)
    if form is None:
        known = "; ".join(", ".join(keys) for keys in _FORMS)
        raise LadderError(f"{where}: a row of no known form: it needs the keys {known}")
    row = {key: given[key] for key in form}
    for key in form:
        several = key in ("choices", "contexts")
        texts = row[key] if several else [row[key]]
        good = isinstance(texts, list) and all(isinstance(each, str) and each.strip() for each in texts)
        if key != "gold" and not (good and len(texts) > several):
            raise LadderError(
                f"{where}: {key} must be {'two or more texts' if several else 'a text'}, not {row[key]!r}"
            )
    if "gold" in row:
        count = len(row.get("choices") or row["contexts"])
        if type(row["gold"]) is not int or not 0 <= row["gold"] < count:
            raise LadderError(f"{where}: gold must be a number from 0 to {count - 1}, not {row['gold']!r}")
    else:
        row["continuation"] = " " + row["continuation"]
    return row, form
