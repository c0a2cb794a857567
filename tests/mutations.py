"""Checkpoints with something wrong in them, drawn by a seed: bytes of a file, values of its JSON, its header, or what
the file is.
"""

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

OUTSIDE = "outside"  # a folder beside the checkpoint that nothing may read
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        3,
        7,
        64,
        2**31,
        2**63,
        10**40,
        0.5,
        -0.0,
        1e-300,
        1e300,
        "",
        "a",
        "\ud800",
        "\0",
    ),
    *("../outside/secret.json", "/etc/hostname", "..", "a/b", "x" * 5000, "NaN", [], {}, [None], {"a": 1}),
    *([0] * 50, [[[]]], {"type": "BPE"}, "silu", "llama", "ladder", "float32", "bfloat16", "ladder:2", "standard"),
)
TEXTS = (b"", b"{", b"null", b"[]", b"{}", b"[" * 100_000, b'{"a":' * 20_000, b'{"a": NaN}', b"\xff\xfe{}", b"1" * 5000)


def _paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where each value is, inside a JSON value; of long lists only some."""
    found = [here] if here else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items)[:200]:
        found += _paths(inner, (*here, key))
    return found


def _change(draw: random.Random, raw: Any) -> Any:
    """One value replaced, removed, copied elsewhere, or added."""
    if not (paths := _paths(raw)):
        return draw.choice(ODD)
    *parents, last = draw.choice(paths)
    inner = raw
    for key in parents:
        inner = inner[key]
    match draw.randrange(5):
        case 0:
            del inner[last]
        case 1 if isinstance(inner, dict):
            inner[draw.choice(("auto_map", "quantization_config", "wiring", "x", "attn_implementation"))] = draw.choice(
                ODD
            )
        case 2 if isinstance(inner[last], int | float):
            inner[last] = draw.choice((inner[last] + 1, -inner[last], inner[last] * 2, inner[last] * 10**6, 0))
        case _:
            inner[last] = draw.choice(ODD)
    return raw


def change_json(draw: random.Random, file: Path) -> None:
    raw = json.loads(file.read_text())
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        raw = _change(draw, raw)
    file.write_text(json.dumps(raw))


def change_bytes(draw: random.Random, file: Path) -> None:
    """Some bytes replaced, removed or added; mostly near the beginning, where headers are."""
    content = bytearray(file.read_bytes())
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(min(len(content), draw.choice((16, 400, 1 << 30))) or 1)
        content[at : at + draw.choice((0, 1, 1, 8))] = draw.randbytes(draw.choice((0, 1, 1, 8)))
    file.write_bytes(content)


def cut(draw: random.Random, file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: draw.randrange(len(content) + 1)])


def replace_text(draw: random.Random, file: Path) -> None:
    file.write_bytes(draw.choice(TEXTS))


def change_kind(draw: random.Random, file: Path) -> None:
    """The file is something else: nothing, a folder, a pipe, a device, a link to elsewhere or to itself."""
    file.unlink()
    match draw.randrange(6):
        case 0:
            pass
        case 1:
            file.mkdir()
        case 2:
            os.mkfifo(file)
        case 3:
            file.symlink_to("/dev/zero")
        case 4:
            file.symlink_to(file)
        case 5:
            file.symlink_to("/dev/null")


def change_header(draw: random.Random, file: Path) -> None:
    """The header of a safetensors file: its length, its offsets, shapes and types."""
    content = file.read_bytes()
    (size,) = struct.unpack_from("<Q", content)
    head, rest = json.loads(content[8 : 8 + size]), content[8 + size :]
    for _ in range(draw.choice((1, 1, 2))):
        head = _change(draw, head)
    text = json.dumps(head).encode()
    told = draw.choice((len(text),) * 6 + (0, 1, len(text) + 1, 2**31, 2**63, 2**64 - 1, 10**8 + 1))
    file.write_bytes(struct.pack("<Q", told) + text + rest)


def mutate(seed: int, folder: Path) -> str:
    """Change a checkpoint; returns which file, and how."""
    draw = random.Random(seed)
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    weights = [name for name in names if name.endswith(".safetensors")]
    texts = [name for name in names if name.endswith(".json")]
    changes: list[tuple[Callable[[random.Random, Path], None], list[str]]] = [
        *[(change_json, texts)] * 5,
        *[(change_header, weights)] * 2,
        (change_bytes, names),
        (cut, names),
        (replace_text, names),
        (change_kind, names),
    ]
    how, among = draw.choice(changes)
    name = draw.choice(among)
    how(draw, folder / name)
    return f"{how.__name__} {name}"
