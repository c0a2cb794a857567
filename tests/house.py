"""What the modules of the package import, call and change, read from their source."""

import ast
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

# what says where a process stands and asks nothing of any other
PASSIVE = {"DistError", "ProcessGroup", "get_rank", "get_world_size", "is_available", "is_initialized"}
PASSIVE |= {"tensor.DTensor"}
MUTATORS = {
    "add",
    "append",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "reverse",
    "setdefault",
}
MUTATORS |= {"sort", "update"}
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Module:
    """One file of the package, or a text that stands for one."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name  # ladder.comm.base
        self.text = text
        self.tree = ast.parse(text)

    @property
    def room(self) -> str:
        """The folder or file in which it lies: a row of the house."""
        return self.name.split(".")[1] if "." in self.name else "__init__"

    @cached_property
    def bindings(self) -> dict[str, str]:
        """What imports give a name here -> the full dotted name of it, wherever in the file they stand."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.name}: relative import"
                found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        return found

    @cached_property
    def imported(self) -> list[str]:
        """The full dotted names of all that it imports."""
        plain = [alias.name for node in ast.walk(self.tree) if isinstance(node, ast.Import) for alias in node.names]
        return plain + [
            f"{node.module}.{alias.name}"
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        ]

    def full(self, node: ast.AST) -> str | None:
        """`dist.all_reduce` -> torch.distributed.all_reduce; None for what no import has named."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.bindings:
            return None
        return ".".join([self.bindings[node.id], *parts])

    def used(self, tree: ast.AST | None = None) -> set[str]:
        """The full names of all that is used, in the whole module or in a part of it."""
        names = (self.full(node) for node in ast.walk(tree or self.tree) if isinstance(node, ast.Attribute | ast.Name))
        return {name for name in names if name is not None}

    def methods(self, tree: ast.AST | None = None) -> set[str]:
        """The attributes read of anything, called or passed on."""
        return {
            node.attr
            for node in ast.walk(tree or self.tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        }

    def definitions(self) -> dict[str, ast.FunctionDef | ast.ClassDef]:
        return {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def package(folder: Path) -> dict[str, Module]:
    """All modules below a folder, by name."""
    files = {".".join(file.relative_to(folder.parent).with_suffix("").parts): file for file in folder.rglob("*.py")}
    return {
        name: Module(name, file.read_text())
        for name, file in sorted((name.removesuffix(".__init__"), file) for name, file in files.items())
    }


# --- who communicates -----------------------------------------------------------------------------------------------


class Communication:
    """How modules of a package communicate: by what `ladder.comm` has for it, or by torch.distributed."""

    def __init__(self, modules: dict[str, Module]) -> None:
        self._comm = [module for module in modules.values() if module.room == "comm"]
        self.methods = self._methods()
        self.definitions = self._definitions()

    def __call__(self, module: Module) -> set[str]:
        """Everything by which a module communicates."""
        used = module.used() | set(module.imported)
        return active(used) | (used & self.definitions) | (module.methods() & self.methods)

    def _methods(self) -> set[str]:
        """What communicators do: the methods of the protocols, but not the waiting for what was begun."""
        protocols = [
            node
            for module in self._comm
            for node in module.definitions().values()
            if isinstance(node, ast.ClassDef) and "typing.Protocol" in {module.full(base) for base in node.bases}
        ]
        methods = (each for node in protocols for each in node.body if isinstance(each, ast.FunctionDef))
        names = {each.name for each in methods if not each.decorator_list}  # a property communicates nothing
        return {name for name in names if not name.startswith("_")} - {"wait"}

    def _definitions(self) -> set[str]:
        """The full names of functions, and of classes that are no communicators, that communicate: themselves, or
        through others of them. To make a communicator is not to use it.
        """
        candidates = {}
        for module in self._comm:
            for name, node in module.definitions().items():
                own = {each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef)}
                if isinstance(node, ast.FunctionDef) or not own & self.methods:
                    local = {f"{module.name}.{each.id}" for each in ast.walk(node) if isinstance(each, ast.Name)}
                    candidates[f"{module.name}.{name}"] = (local | module.used(node), module.methods(node))
        found = {name for name, (used, methods) in candidates.items() if methods & self.methods or active(used)}
        while more := {name for name, (used, _) in candidates.items() if used & found} - found:
            found |= more
        return found


def active(names: set[str]) -> set[str]:
    """What of torch.distributed is more than passive."""
    own = {name.removeprefix("torch.distributed.") for name in names if name.startswith("torch.distributed.")}
    return {name for name in own if name not in PASSIVE and not any(each.startswith(f"{name}.") for each in PASSIVE)}


# --- what happens at import, and what is changed later --------------------------------------------------------------


def at_import(module: Module) -> list[int]:
    """Lines at module level, blocks included, that do something rather than define it."""

    def lines(body: list[ast.stmt]) -> Iterator[int]:
        for node in body:
            call = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
            if call or isinstance(node, ast.For | ast.While | ast.With | ast.Delete):
                yield node.lineno
            elif isinstance(node, ast.Assign) and not all(
                isinstance(each, ast.Name | ast.Tuple) for each in node.targets
            ):
                yield node.lineno  # something that another module made
            elif isinstance(node, ast.If) and "__name__" not in ast.unparse(node.test):
                yield from lines([*node.body, *node.orelse])
            elif isinstance(node, ast.Try):
                yield from lines(
                    [*node.body, *node.orelse, *node.finalbody, *(x for h in node.handlers for x in h.body)]
                )

    return list(lines(module.tree.body))


def changed_state(module: Module) -> list[str]:
    """Variables of the module that its functions change."""
    own = {each.id for node in module.tree.body for each in ast.walk(node)
           if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(each, ast.Name)
           and isinstance(each.ctx, ast.Store)}  # fmt: skip
    found = []
    for function in (node for node in ast.walk(module.tree) if isinstance(node, Function)):
        local = {
            each.id for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        }
        local |= {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
        for node in ast.walk(function):
            base: ast.AST | None = None
            if isinstance(node, ast.Global):
                found += node.names
            elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                base = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
                base = node.func.value
            if isinstance(base, ast.Name) and base.id in own - local:
                found.append(base.id)
    return found


def patched(module: Module) -> list[str]:
    """Attributes of what other packages brought along that the module sets: `transformers.X.method = ...`."""
    stored = [
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
    ]
    names = [module.full(node) for node in stored]
    return [name for name in names if name is not None and not name.startswith("ladder.")]


# --- which modules are there for something --------------------------------------------------------------------------


def dependencies(module: Module, modules: dict[str, Module]) -> set[str]:
    """The modules of the package that it imports, by statements or by names in strings, parents included."""
    named = set(module.imported) | {
        node.value.split(":")[0]
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.match(r"ladder(\.\w+)+(:\w+)?$", node.value)
    }
    found = set()
    for name in named:
        parts = name.split(".")
        found |= {".".join(parts[: end + 1]) for end in range(len(parts))} & modules.keys()
    return found


def reached(begin: set[str], modules: dict[str, Module]) -> set[str]:
    """All modules that are imported by some, or by those that they import."""
    found, left = set[str](), list(begin)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += dependencies(modules[name], modules)
    return found


def programs(texts: list[str]) -> set[str]:
    """The modules that texts tell users to run: `python -m ladder.bench.overlap`."""
    return {name for text in texts for name in re.findall(r"-m (ladder(?:\.\w+)*)", text)}


def examples(texts: list[str]) -> set[str]:
    """The modules that texts tell users to import: `from ladder.comm.emulated import World`."""
    return {name for text in texts for name in re.findall(r"(?:from|import) (ladder(?:\.\w+)*)", text)}


# --- the README's tree ----------------------------------------------------------------------------------------------


def listed(readme: str) -> list[str]:
    """The paths that the tree names: lines below the indented `ladder/`, each level two spaces further in."""
    lines = iter(readme.splitlines())
    first = next(line for line in lines if line.strip() == "ladder/")
    margin = len(first) - len(first.lstrip())
    path, found = ["ladder"], list[str]()
    for line in lines:
        indent = len(line) - len(line.lstrip())
        depth, left = divmod(indent - margin, 2)
        if not line.strip() or depth < 1:
            return found
        if left or depth > len(path):
            continue  # a remark that goes on
        name = line.split()[0]
        path = [*path[:depth], name.rstrip("/")]
        found.append("/".join(path) + ("/" if name.endswith("/") else ""))
    return found
