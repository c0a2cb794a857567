"""Drawings of wirings, as SVG, made from the table of wirings: what each sub-block reads, and when everything runs.

python -m experiments.wiring_drawings docs/pictures
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ladder.perf.schedule import needs
from ladder.wiring import Out, SubBlock, Wiring

WIRINGS = ("standard", "parallel", "ladder", "ladder-2", "ladder-1-2", "parallel-1", "desync-2x", "none")
LAYERS, COMPUTE, ALL_REDUCE = 3, 1.0, 0.75  # how long they take, in the unit of the time axis
WIDTH, LEFT, UNIT, BLOCK = 860, 118, 66, 88  # pixels: the picture, its labels, a unit of time, a sub-block
STYLE = """text{font:13px system-ui,sans-serif;fill:#1f2328}.small{font-size:12px;fill:#59636e}.back{fill:#fff}
text.block{text-anchor:middle;fill:#fff}.attention{fill:#0072b2}.mlp{fill:#00664b}.comm{fill:#d55e00}
.waits{text-anchor:middle}.wait{fill:none;stroke:#8c959f;stroke-dasharray:3 3}
.line{stroke:#59636e;stroke-width:1.5;fill:none}.stream{stroke:#1f2328;stroke-width:3}.held{stroke-dasharray:4 3}
.read-attention{stroke:#0072b2}.read-mlp{stroke:#00996f}.add{fill:#fff;stroke:#59636e;stroke-width:1.5}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.back,.add{fill:#0d1117}.stream{stroke:#e6edf3}
.line,.add{stroke:#9198a1}.read-attention{stroke:#56b4e9}.read-mlp{stroke:#2fc79a}.small{fill:#9198a1}}"""


@dataclass(frozen=True)
class Span:
    """Something that runs from `start` to `end`; `number` is the sub-block's."""

    number: int
    start: float
    end: float


def blocks_of(wiring: str, layers: int = LAYERS) -> list[SubBlock]:
    return [block for layer in Wiring.parse(wiring, layers).sub_blocks() for block in layer]


def run(blocks: Sequence[SubBlock]) -> tuple[list[Span], list[Span], float]:
    """The sub-blocks' spans, the all-reduces', and the end: on one lane, with one all-reduce at a time."""
    now = link = 0.0
    computed, sent = list[Span](), list[Span]()
    for number, (block, need) in enumerate(zip(blocks, needs(blocks), strict=True)):
        now = max([now, *(span.end for span in sent[: need.all_reduces])])
        computed.append(Span(number, now, now + COMPUTE))
        now += COMPUTE
        if block.out is Out.REDUCE:
            link = max(now, link) + ALL_REDUCE
            sent.append(Span(number, link - ALL_REDUCE, link))
    return computed, sent, max([now, *(span.end for span in sent)])


def kind(number: int) -> str:
    return "mlp" if number % 2 else "attention"


def name(number: int) -> str:
    return f"{'MLP' if number % 2 else 'attention'} {number // 2 + 1}"


def data_flow(blocks: Sequence[SubBlock]) -> list[str]:
    """The stream as a line from left to right; below it the sub-blocks. Arrows down are reads, lines up results."""
    top, box, high = 64, 108, 28
    parts = [f'<text class="small" x="8" y="{top + 4}">residual stream</text>']
    parts.append(f'<line class="stream" x1="{LEFT}" y1="{top}" x2="{WIDTH - 16}" y2="{top}"/>')
    starts = [LEFT + 16 + number * (BLOCK + 32) for number in range(len(blocks))]
    reduced = [number for number, block in enumerate(blocks) if block.out is Out.REDUCE]
    for number, (block, need) in enumerate(zip(blocks, needs(blocks), strict=True)):
        x, local = starts[number], [n for n in range(number) if blocks[n].out is Out.LOCAL]
        seen = reduced[need.all_reduces - 1] if need.all_reduces else -1
        last = max([seen, *local[-1:]])
        source = (starts[last] + BLOCK + 16 if last >= 0 else LEFT) + 7
        target = x + BLOCK // 3
        way = f"M{source} {top} C{source} {box - 8} {target} {top} {target} {box - 2}"
        parts.append(f'<path class="line read-{kind(number)}" marker-end="url(#tip)" d="{way}"/>')
        parts.append(f'<rect class="{kind(number)}" x="{x}" y="{box}" width="{BLOCK}" height="{high}" rx="4"/>')
        parts.append(f'<text class="block" x="{x + BLOCK / 2}" y="{box + 19}">{name(number)}</text>')
        out = x + BLOCK + 16
        if block.out is Out.HOLD:
            parts.append(f'<path class="line held" d="M{x + BLOCK} {box + 20} H{starts[number + 1]}"/>')
            continue
        dashed = " held" if block.out is Out.LOCAL else ""
        parts.append(f'<path class="line{dashed}" d="M{x + BLOCK} {box + 8} H{out} V{top + 6}"/>')
        parts.append(f'<circle class="add" cx="{out}" cy="{top}" r="7"/>')
        parts.append(f'<path class="line" d="M{out - 4} {top} H{out + 4} M{out} {top - 4} V{top + 4}"/>')
    return parts


def timeline(blocks: Sequence[SubBlock]) -> list[str]:
    computed, sent, end = run(blocks)
    parts, rows = list[str](), {"computation": 172, "all-reduces": 206}
    for label, y in rows.items():
        parts.append(f'<text class="small" x="8" y="{y + 18}">{label}</text>')
    now = 0.0
    for span in computed:
        if span.start > now:
            x, wide = LEFT + now * UNIT, (span.start - now) * UNIT
            parts.append(f'<rect class="wait" x="{x:g}" y="{rows["computation"]}" width="{wide:g}" height="26"/>')
            parts.append(f'<text class="small waits" x="{x + wide / 2:g}" y="{rows["computation"] + 18}">waits</text>')
        x, wide, now = LEFT + span.start * UNIT, COMPUTE * UNIT - 1, span.end
        short = "MLP" if span.number % 2 else "attn"
        parts.append(
            f'<rect class="{kind(span.number)}" x="{x:g}" y="{rows["computation"]}" width="{wide:g}" height="26"/>'
        )
        parts.append(f'<text class="block" x="{x + wide / 2:g}" y="{rows["computation"] + 18}">{short}</text>')
    for span in sent:
        x, wide = LEFT + span.start * UNIT, ALL_REDUCE * UNIT - 1
        parts.append(f'<rect class="comm" x="{x:g}" y="{rows["all-reduces"]}" width="{wide:g}" height="26"/>')
    parts.append(f'<path class="line" d="M{LEFT + end * UNIT:g} 166 V238"/>')
    return parts


def draw(wiring: str) -> str:
    blocks, high = blocks_of(wiring), 248
    number = Wiring.parse(wiring, LAYERS).all_reduces()
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {high}" width="{WIDTH}" height="{high}" '
    head += f'role="img" aria-label="the wiring {wiring}">'
    tip = '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    tip += '<path d="M0 0 L8 4 L0 8 z" fill="#59636e"/></marker></defs>'
    title = f'<text x="8" y="24">{wiring}: {LAYERS} layers, {number or "no"} all-reduces</text>'
    back = f'<rect class="back" width="{WIDTH}" height="{high}"/>'
    parts = [head, f"<style>{STYLE}</style>", tip, back, title, *data_flow(blocks), *timeline(blocks), "</svg>\n"]
    return "\n".join(parts)


def main(folder: Path) -> None:
    for wiring in WIRINGS:
        (folder / f"wiring-{wiring}.svg").write_text(draw(wiring), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
