"""The rules of the house, checked by what modules import, call and change; and that each check can fail."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import house
from tests.house import Module

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ladder"
# A module imports only from rows above its own, or from its own room.
ROWS = [
    "errors",
    "logs",
    "options",
    "files",
    "progress",
    "hub",
    "devices",
    "jit",
    "wiring",
    "comm",
    "config",
    "lanes",
    "residual",
    "layers",
]
ROWS += [
    "kernels",
    "model",
    "plotting",
    "charts",
    "perf",
    "checkpoint",
    "engine",
    "server",
    "hf",
    "data",
    "scan",
    "quantize",
    "train",
    "bench",
    "client",
    "load",
    "report",
    "explore",
    "chat",
    "vllm",
]
ROWS += ["cli", "__main__"]
COMMUNICATING = {"comm", "residual", "engine", "train", "bench"}
WITHOUT_TORCH = ["ladder", "ladder.wiring", "ladder.comm.link", "ladder.config", "ladder.perf.plan", "ladder.cli"]
DRAWERS = {"utils", "util", "common", "helpers", "helper", "misc"}
LINES, FILES = 350, 14  # of a file; in a folder, its __init__.py not counted
# what is changed in other libraries, because nothing public can do it: the reason stands there
PATCHED: dict[str, set[str]] = {
    "ladder.hf.register": {
        "transformers.PreTrainedModel.post_init",
        "transformers.PreTrainedConfig.get_config_dict",
        "transformers.PreTrainedConfig.from_dict",
        "transformers.utils.hub.cached_files",
        "transformers.PreTrainedModel.save_pretrained",
    },
    "ladder.hf.names": {
        "peft.tuners.tuners_utils.BaseTuner.inject_adapter",
        "peft.PeftModel._setup_prompt_encoder",
        "peft.PeftModel.save_pretrained",
    },
}
# who looks at the environment: at NCCL's variables, torchrun's and vLLM's
ENVIRONMENTS = {"ladder.engine.executors.control", "ladder.engine.executors.torchrun", "ladder.vllm.serve"}
# texts that tell users which programs there are
TEXTS = [ROOT / "README.md", ROOT / "results" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

MODULES = house.package(PACKAGE)
COMMUNICATION = house.Communication(MODULES)


def plant(name: str, text: str) -> Module:
    return Module(name, text)


# --- imports --------------------------------------------------------------------------------------------------------


def wrong_imports(module: Module) -> list[str]:
    """Names from rows that are not above the module's own."""
    if module.room == "__init__":
        return []
    assert module.room in ROWS, f"{module.room} has no row in the house"
    own = [name.split(".")[1] for name in module.imported if name.startswith("ladder.")]
    return [
        room for room in own if room not in (module.room, "__version__") and ROWS.index(room) > ROWS.index(module.room)
    ]


@pytest.mark.parametrize("name", MODULES)
def test_imports_come_from_rows_above(name: str) -> None:
    assert not wrong_imports(MODULES[name])


def test_no_torch() -> None:
    """In one process, one after the other."""
    program = "import sys, importlib\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    program += "    assert not {'torch', 'transformers'} & sys.modules.keys(), name\n"
    assert subprocess.run([sys.executable, "-c", program, *WITHOUT_TORCH]).returncode == 0


def test_the_import_rules_can_fail() -> None:
    planted = plant("ladder.wiring", "def f():\n    from ladder.model import Decoder\n    from ladder import hf\n")
    assert wrong_imports(planted) == ["model", "hf"]
    assert not wrong_imports(plant("ladder.model", "from ladder.wiring import Wiring\nfrom ladder.errors import E\n"))


# --- communication --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_only_the_stream_the_engine_training_and_benchmarks_communicate(name: str) -> None:
    if MODULES[name].room not in COMMUNICATING:
        assert not COMMUNICATION(MODULES[name])


def test_what_communicators_do() -> None:
    assert COMMUNICATION.methods >= {"all_reduce", "all_gather"}
    assert COMMUNICATION(MODULES["ladder.residual"]) == {"all_reduce", "all_gather"}


PLANTED = {
    "ladder.comm.base": """
from typing import Protocol
class Comm(Protocol):
    @property
    def size(self): ...
    def all_reduce(self, x): ...
    def swap(self, x): ...
class Solo:
    def all_reduce(self, x): return x
""",
    "ladder.comm.ways": """
from torch.autograd import Function
from torch import distributed
class Way(Function):
    def forward(ctx, comm, x): return comm.swap(x)
def joined(comm, x): return Way.apply(comm, x)
def all_joined(comm, xs): return [joined(comm, x) for x in xs]
def everyone(group): distributed.barrier(group)
def named(comm): return f"{comm.size}"
""",
}


@pytest.mark.parametrize("text, found", [
    ("def f(comm, x):\n    return comm.all_reduce(x)\n", {"all_reduce"}),
    ("def f(comm, x):\n    return map(comm.swap, x)\n", {"swap"}),
    ("import torch.distributed as dist\ndef f(x):\n    dist.broadcast(x, 0)\n", {"broadcast"}),
    ("import torch\ndef f(x):\n    torch.distributed.barrier()\n", {"barrier"}),
    ("from torch.distributed import all_to_all as other\n", {"all_to_all"}),
    ("from torch.distributed.nn import functional\n", {"nn.functional"}),
    ("from ladder.comm.ways import joined as other\n", {"ladder.comm.ways.joined"}),
    ("from ladder.comm import ways as w\ndef f(c, x):\n    w.all_joined(c, x)\n", {"ladder.comm.ways.all_joined"}),
    ("from ladder.comm.ways import Way, everyone\n", {"ladder.comm.ways.Way", "ladder.comm.ways.everyone"}),
    ("import torch.distributed as dist\ndef f():\n    return dist.is_initialized()\n", set()),
    ("from torch.distributed.tensor import DTensor\ndef f(x):\n    return isinstance(x, DTensor)\n", set()),
    ("from ladder.comm.base import Comm, Solo\ndef f(comm: Comm = Solo()):\n    return comm.size\n", set()),
    ("from ladder.comm.ways import named\ndef f(comm, x):\n    return named(comm), x.wait()\n", set()),
])  # fmt: skip
def test_the_communication_rule_can_fail(text: str, found: set[str]) -> None:
    rule = house.Communication({name: plant(name, planted) for name, planted in PLANTED.items()})
    assert rule(plant("ladder.layers.planted", text)) == found


# --- nothing at import, no state ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_nothing_happens_at_import(name: str) -> None:
    """At module level: definitions, imports, constants. No loop, no call for its effect."""
    if name != "ladder.hf":  # which teaches transformers
        assert not house.at_import(MODULES[name])


@pytest.mark.parametrize("name", MODULES)
def test_no_state_of_modules_and_no_environment(name: str) -> None:
    """No variable that functions change, no other library changed, no environment variable of our own."""
    module = MODULES[name]
    assert not house.changed_state(module)
    assert set(house.patched(module)) <= PATCHED.get(name, set())
    assert not {"os.environ", "os.getenv"} & module.used() or name in ENVIRONMENTS


@pytest.mark.parametrize("text, line", [
    ("X = 1\nprint(X)\n", [2]), ("for x in (1, 2):\n    pass\n", [1]), ("import os\nos.environ['A'] = 'b'\n", [2]),
    ("if True:\n    f()\n", [2]), ("try:\n    f()\nexcept ImportError:\n    pass\n", [2]),
    ("from a import B\nB.c = 1\n", [2]), ("X: list[int] = []\n'''Words.'''\ndef f():\n    g()\n", []),
    ("if __name__ == '__main__':\n    main()\n", []),
])  # fmt: skip
def test_the_rule_of_imports_without_effect_can_fail(text: str, line: list[int]) -> None:
    assert house.at_import(plant("ladder.planted", text)) == line


@pytest.mark.parametrize("text, found", [
    ("X = None\ndef f():\n    global X\n    X = 1\n", ["X"]), ("X = {}\ndef f(k):\n    X[k] = 1\n", ["X"]),
    ("X = []\ndef f(k):\n    X.append(k)\n", ["X"]), ("X: list = []\nf = lambda k: X.append(k)\n", ["X"]),
    ("X = []\ndef f(X):\n    X.append(1)\n", []), ("X = [1]\ndef f():\n    return X[0]\n", []),
])  # fmt: skip
def test_the_rule_of_state_can_fail(text: str, found: list[str]) -> None:
    assert house.changed_state(plant("ladder.planted", text)) == found


def test_the_rule_of_other_libraries_can_fail() -> None:
    text = "from tqdm import tqdm\nimport transformers as t\n"
    text += "def f(x):\n    tqdm.__init__ = x\n    t.utils.logging.level = 1\n"
    assert house.patched(plant("ladder.planted", text)) == ["tqdm.tqdm.__init__", "transformers.utils.logging.level"]
    assert "os.environ" in plant("ladder.planted", "import os\nX = os.environ.get('A')\n").used()


# --- what there is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_files_are_small(name: str) -> None:
    assert len(MODULES[name].text.splitlines()) <= LINES


def crowded(files: list[Path]) -> list[Path]:
    count = Counter(file.parent for file in files if file.name not in ("__init__.py", "__main__.py"))
    return [folder for folder, number in count.items() if number > FILES]


def drawers(files: list[Path]) -> list[Path]:
    return [
        file for file in files if {word for part in file.with_suffix("").parts for word in part.split("_")} & DRAWERS
    ]


def paths() -> list[Path]:
    return [file.relative_to(ROOT) for file in sorted(PACKAGE.rglob("*.py"))]


def test_folders_are_small_and_have_a_purpose() -> None:
    assert not crowded(paths()) and not drawers(paths())


def test_the_rules_of_files_can_fail() -> None:
    assert crowded([Path(f"ladder/x/{number}.py") for number in range(FILES + 1)]) == [Path("ladder/x")]
    assert drawers([Path("ladder/hf/text_utils.py"), Path("ladder/common/a.py"), Path("ladder/comm/base.py")]) == [
        Path("ladder/hf/text_utils.py"),
        Path("ladder/common/a.py"),
    ]


def roots() -> set[str]:
    """Where users come in: the package, its command line, the transformers host, and what texts tell them to use."""
    doors = {
        name for name in MODULES if name in ("ladder", "ladder.__main__", "ladder.hf") or MODULES[name].room == "cli"
    }
    texts = [file.read_text() for file in TEXTS]
    return doors | ((house.programs(texts) | house.examples(texts)) & MODULES.keys())


def test_every_module_is_there_for_a_user() -> None:
    """Not only for tests: imported from where users come in, or by what is."""
    assert sorted(MODULES.keys() - house.reached(roots(), MODULES)) == []


def test_programs_are_programs() -> None:
    for name in house.programs([file.read_text() for file in TEXTS]) - {"ladder"}:
        tests = [node.test for node in MODULES[name].tree.body if isinstance(node, ast.If)]
        assert "__name__ == '__main__'" in map(ast.unparse, tests), name


def test_the_rule_of_reaching_can_fail() -> None:
    texts = {
        "ladder": "_FACE = {'A': 'ladder.a'}\n",
        "ladder.a": "def f():\n    from ladder.b import g\n",
        "ladder.b": "from ladder import c\n",
        "ladder.c": "",
        "ladder.d": "import ladder.a\n",
    }
    modules = {name: plant(name, text) for name, text in texts.items()}
    assert modules.keys() - house.reached({"ladder"}, modules) == {"ladder.d"}
    texts = ["run `python -m ladder.x.y --z`, or python -m ladder", "    from ladder.v.w import U"]
    assert (house.programs(texts), house.examples(texts)) == ({"ladder.x.y", "ladder"}, {"ladder.v.w"})


def test_the_readme_lists_every_file_and_no_other() -> None:
    """Each by its own path: one line `options.py` stands for one file."""
    tree = house.listed((ROOT / "docs" / "architecture.md").read_text())
    files = [str(file) for file in paths() if file.name not in ("__init__.py", "__main__.py")]
    assert len(tree) == len(set(tree))
    assert sorted(set(files) - set(tree)) == []
    assert [path for path in tree if not (ROOT / path).exists() or path.endswith("/") != (ROOT / path).is_dir()] == []


def test_the_rule_of_the_readme_can_fail() -> None:
    text = (
        "# ladder\n\n    ladder/\n      a.py      one\n      b/        two\n        a.py    three\n"
        "                which goes on\n      c.py      four\n\n    ladder/\n      d.py\n"
    )
    assert house.listed(text) == ["ladder/a.py", "ladder/b/", "ladder/b/a.py", "ladder/c.py"]
