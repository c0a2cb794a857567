"""One changed checkpoint, opened by all that opens checkpoints: it works, or there is one sentence."""

import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ladder.checkpoint import Random, load, save
from ladder.config import ModelConfig
from ladder.engine.llm import LLM
from ladder.engine.options import EngineOptions, SamplingParams
from ladder.engine.setup import Setup
from ladder.errors import LadderError
from ladder.hf.convert import convert
from ladder.model import Decoder
from tests.checkpoints import byte_tokenizer
from tests.mutations import OUTSIDE, mutate

SLOW = 20.0  # seconds of computing that no checkpoint may take


def originals(folder: Path) -> list[Path]:
    """Checkpoints to change: in one file, in several; and what must not be read beside them."""
    config = ModelConfig.named("tiny").first(2)
    made = [folder / "one", folder / "several"]
    save(load(Decoder(config), Random(seed=5)), made[0])
    save(load(Decoder(config.rewired("ladder")), Random(seed=5)), made[1], file_bytes=100_000)
    for path in made:
        byte_tokenizer().save_pretrained(path)
        (path / "generation_config.json").write_text('{"eos_token_id": [256]}')
    (folder / OUTSIDE).mkdir()
    (folder / OUTSIDE / "secret.json").write_text("{}")
    return made


class Opened:
    """What this process opens while it is watched. An audit hook cannot be removed: there is one of it."""

    def __init__(self) -> None:
        self.paths: list[str] | None = None
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.paths is not None and event in ("open", "os.mkdir", "os.rename", "os.remove", "os.symlink"):
            self.paths.append(str(arguments[0]))

    @contextmanager
    def watched(self) -> Iterator[list[str]]:
        self.paths = found = []
        try:
            yield found
        finally:
            self.paths = None


class Fuzzer:
    """Changes copies of checkpoints and counts how it ends. A failure is a text for a person to repeat it by."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.originals = originals(folder)
        self.opened = Opened()
        self.ended: Counter[str] = Counter()
        self.failures: list[str] = []
        self.slowest = 0.0

    def run(self, seed: int) -> None:
        folder, out = self.folder / "changed", self.folder / "converted"
        shutil.copytree(self.originals[seed % 2], folder)
        what = mutate(seed, folder)
        begin = time.process_time()
        try:
            for name, work in (("generate", self._generate), ("convert", self._convert)):
                with self.opened.watched() as paths:
                    self._judge(f"seed {seed}: {what}: {name}", work, folder)
                if wrong := [path for path in paths if self._forbidden(path)]:
                    self.failures.append(f"seed {seed}: {what}: {name} opened {wrong[0]}")
            seconds = time.process_time() - begin
            self.slowest = max(self.slowest, seconds)
            if seconds > SLOW:
                self.failures.append(f"seed {seed}: {what}: {seconds:.0f} s")
        finally:
            shutil.rmtree(folder)
            shutil.rmtree(out, ignore_errors=True)

    def _judge(self, what: str, work: Any, folder: Path) -> None:
        try:
            work(folder)
            self.ended["works"] += 1
        except LadderError as error:
            self.ended["refused"] += 1
            if "\n" in str(error) or len(str(error)) > 2000:
                self.failures.append(f"{what}: no sentence: {str(error)[:200]!r}")
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self.failures.append(f"{what}: {type(error).__name__}: {str(error)[:200]!r}")

    def _generate(self, folder: Path) -> None:
        """All that is done before weights are read, and with a config of this size the rest, too."""
        setup = Setup(EngineOptions(folder))
        if setup.weight_bytes < 1 << 24 and setup.config.context <= 1 << 16:
            requests = setup.requests(["ab" if setup.tokenizer is not None else [1, 2]], SamplingParams(2))
            with LLM.load(setup) as llm:
                for _ in llm.run(requests):
                    pass

    def _convert(self, folder: Path) -> None:
        convert(str(folder), self.folder / "converted", "ladder")

    def _forbidden(self, path: str) -> bool:
        """Beside the checkpoint, or one of the files that changed names point to."""
        known = str(self.folder / "converted"), str(self.folder / "changed") + "/"
        resolved = str(Path(path).absolute()) if path.startswith((".", "/")) else path
        if ".." in path or resolved in ("/etc/hostname", "/dev/zero"):
            return True
        return resolved.startswith(str(self.folder)) and not (resolved + "/").startswith(known)
