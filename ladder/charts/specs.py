"""Charts as Vega-Lite descriptions: curves with points, bars, and timelines. No torch here.

A chart's numbers are lists of records under `datasets`, so that a page can leave out an arm's or put others in; layers
without any are left out. A record that has a `title` and `tips` tells them to the mouse and to the keyboard.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ladder.charts.looks import TIMES, Look
from ladder.charts.theme import KINDS

Spec = dict[str, Any]
Records = Sequence[Mapping[str, Any]]

SHAPES = {
    "circle": "circle",
    "square": "square",
    "triangle": "triangle-up",
    "down": "triangle-down",
    "diamond": "diamond",
    "pentagon": "M0,-1L.95,-.31L.59,.81L-.59,.81L-.95,-.31Z",
    "cross": "M-.6,-.9L0,-.3L.6,-.9L.9,-.6L.3,0L.9,.6L.6,.9L0,.3L-.6,.9L-.9,.6L-.3,0L-.9,-.6Z",
}
SPEEDUPS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100)
ROUND = tuple(digit * 10.0**power for power in range(-3, 9) for digit in (1, 2, 5))
HEIGHT = 330
PADDING = 14  # pixels between an axis and what is nearest to it
WORK = "datum.title && datum.kind != 'wait'"
LANE_NAMES = "datum.value < 2 ? 'compute' : 'link'"


@dataclass(frozen=True)
class Axis:
    """What is along it. `names`: texts at places, instead of numbers."""

    title: str
    log: bool = False
    reach: tuple[float, float] | None = None
    names: Mapping[float, str] = field(default_factory=dict)

    def channel(self, name: str) -> Spec:
        scale: Spec = {"type": "log" if self.log else "linear", "nice": False, "padding": 0 if self.reach else PADDING}
        axis: Spec = {"title": self.title, "labelOverlap": "greedy"}
        if self.reach is not None:
            scale["domain"] = list(self.reach)
        if self.names:
            axis["values"] = list(self.names)
            axis["labelExpr"] = _lookup(self.names)
        elif self.log:
            axis |= {"values": list(ROUND), "format": "~g"}
        else:
            axis["tickCount"] = 6
        return {"field": name, "type": "quantitative", "scale": scale, "axis": axis}


def speedup_axis(title: str, reach: tuple[float, float] | None = None) -> Axis:
    """Times as fast as standard, on a logarithmic scale."""
    ticks = [tick for tick in SPEEDUPS if reach is None or reach[0] <= tick <= reach[1]]
    return Axis(title, True, reach, {tick: f"{tick:g}{TIMES}" for tick in ticks})


def curves(x: Axis, y: Axis, looks: Mapping[str, Look], datasets: Mapping[str, Records], base: bool = False) -> Spec:
    """Lines (`lines`: x, y, order), points (`points`: x, y, and low and high where they are known) and small dots
    (`dots`) of arms, rings around some of them (`rings`: x, y), names beside points (`names`: x, y, text), and a chosen
    place along x (`chosen`: x, text). `base`: a line at 1.
    """
    at = {"x": x.channel("x"), "y": y.channel("y")}
    line = {"type": "line", "strokeWidth": 2, "clip": True, "aria": False}
    point = {"type": "point", "filled": True, "size": 75, "strokeWidth": 1.6, "opacity": 1, "clip": False}
    dot = {"type": "point", "filled": True, "shape": "circle", "size": 36, "opacity": 1, "clip": True}
    ring = {"type": "point", "shape": "circle", "size": 170, "style": "ring", "aria": False}
    layers = [_base()] if base else []
    layers += [
        {
            "data": {"name": "chosen"},
            "mark": {"type": "rule", "style": "chosen", "aria": False},
            "encoding": {"x": at["x"]},
        },
        {"data": {"name": "lines"}, "mark": line, "encoding": {**at, **_line(looks), "order": {"field": "order"}}},
        {
            "data": {"name": "whiskers"},
            "mark": {"type": "rule", "aria": False, "strokeWidth": 1.3, "clip": True},
            "encoding": {**at, "y": {**at["y"], "field": "low"}, "y2": {"field": "high"}, "color": _colour(looks)},
        },
        {"data": {"name": "dots"}, "mark": dot, "encoding": {**at, "color": _colour(looks), **_told()}},
        {"data": {"name": "points"}, "mark": point, "encoding": {**at, **_point(looks)}},
        {"data": {"name": "rings"}, "mark": ring, "encoding": at},
        {
            "data": {"name": "names"},
            "mark": {"type": "text", "style": "quiet", "align": "left", "dx": 8, "dy": -7, "aria": False},
            "encoding": {**at, "text": {"field": "text"}},
        },
        {
            "data": {"name": "chosen"},
            "mark": {"type": "text", "style": "note", "align": "left", "dx": 5, "dy": 9, "aria": False},
            "encoding": {"x": at["x"], "y": {"value": 0}, "text": {"field": "text"}},
        },
    ]  # fmt: skip
    wanted = [layer for layer in layers if "name" not in layer["data"] or layer["data"]["name"] in datasets]
    return {"width": 760, "height": HEIGHT, "layer": wanted, "datasets": _plain(datasets), **_fitted()}


def within(chart: Spec, channel: str) -> Spec:
    """The chart with an axis that reaches from its parameter `low` to its parameter `high`: a page sets them."""
    layers = []
    for layer in chart["layer"]:
        if "scale" in (own := layer["encoding"].get(channel, {})):
            scale = {**own["scale"], "domainMin": {"expr": "low"}, "domainMax": {"expr": "high"}, "padding": 0}
            layer = {**layer, "encoding": {**layer["encoding"], channel: {**own, "scale": scale}}}
        layers.append(layer)
    return {**chart, "params": [{"name": "low", "value": 0.95}, {"name": "high", "value": 2}], "layer": layers}


def whiskers(records: Records) -> list[Mapping[str, Any]]:
    """Of those whose spread is known."""
    return [record for record in records if record.get("low") is not None]


def bars(y_title: str, looks: Mapping[str, Look], records: Records, label: str, log: bool = False) -> Spec:
    """A bar for each arm of each group (`group`, `arm`, `y`, `text`, low and high where they are known), with a line at
    1. `log`: points on a logarithmic axis, and neither texts nor a line.
    """
    at: Spec = {"x": {"field": "group", "type": "ordinal", "sort": None, "axis": {"title": label, "labelAngle": 0}}}
    at["x"]["scale"] = {"paddingInner": 0.14, "paddingOuter": 0.05}
    at["xOffset"] = {"field": "arm", "type": "nominal", "scale": {"domain": list(looks), "paddingInner": 0.1}}
    scale = {"type": "log", "nice": False, "padding": PADDING} if log else {"zero": True}
    axis: Spec = {"title": y_title, **({"values": list(ROUND), "format": "~g"} if log else {"tickCount": 6})}
    y = {"type": "quantitative", "axis": axis, "scale": scale}
    point: Spec = {"type": "point", "filled": True, "size": 75, "opacity": 1}
    mark, look = (point, _point(looks)) if log else ({"type": "bar"}, _bar(looks))
    named = {"name": "points"}
    whisker = {"type": "rule", "style": "whisker", "aria": False}
    spread = {**at, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
    text = {"type": "text", "style": "note", "dy": -5, "baseline": "bottom", "aria": False}
    layers = [
        {"data": named, "mark": mark, "encoding": {**at, "y": {**y, "field": "y"}, **look}},
        {"data": {"name": "whiskers"}, "mark": whisker, "encoding": spread},
        {
            "data": named,
            "transform": [{"calculate": "isValid(datum.high) ? max(datum.y, datum.high) : datum.y", "as": "top"}],
            "mark": text,
            "encoding": {**at, "y": {**y, "field": "top"}, "text": {"field": "text"}},
        },
        _base(),
    ]
    if log:
        del layers[2:]
    numbers = {"points": records, "whiskers": whiskers(records)}
    return {"width": 760, "height": HEIGHT - 40, "layer": layers, "datasets": _plain(numbers), **_fitted()}


def timeline(unit: str, records: Records, lane: int = 26) -> Spec:
    """Lanes of computation above the link's, for each `heading` in the order of `order`: bars (`kind`: attention, MLP,
    all-reduce or wait; begin, end, top, bottom; label) and what follows from what (`kind`: edge; begin, end, top,
    bottom). A page leaves out layers that have no record.
    """
    x = {"field": "begin", "type": "quantitative", "axis": {"title": unit, "tickCount": 8}, "scale": {"nice": False}}
    scale = {"domain": [0, 3], "reverse": True, "nice": False}
    lanes = {"title": None, "values": [1, 2.5], "labelExpr": LANE_NAMES, "grid": False, "domain": False, "ticks": False}
    y = {"field": "top", "type": "quantitative", "scale": scale, "axis": lanes}
    at = {"x": x, "x2": {"field": "end"}, "y": y, "y2": {"field": "bottom"}}
    work: Spec = {"field": "kind", "type": "nominal", "legend": None}
    work["scale"] = {"domain": list(KINDS), "range": list(KINDS.values())}
    middle = {"x": {**x, "field": "middle"}, "y": {**y, "field": "centre"}, "text": {"field": "label"}}
    layers = [
        _filtered("wait", "datum.kind == 'wait'", {"type": "rect", "style": "wait"}, {**at, **_told()}),
        _filtered("edge", "datum.kind == 'edge'", {"type": "rule", "style": "edge", "aria": False}, at),
        _filtered("work", WORK, {"type": "rect", "style": "work"}, {**at, "color": work, **_told()}),
        _filtered(
            "label", "isValid(datum.label)", {"type": "text", "fill": "white", "fontSize": 11, "aria": False}, middle
        ),
    ]
    layers[-1]["transform"].append({"calculate": "(datum.begin + datum.end) / 2", "as": "middle"})
    layers[-1]["transform"].append({"calculate": "(datum.top + datum.bottom) / 2", "as": "centre"})
    row: Spec = {"field": "heading", "type": "nominal", "sort": {"field": "order", "op": "min"}, "title": None}
    row |= {"header": {"orient": "top", "title": None, "labelLimit": 0, "labelPadding": 3}}
    inner = {"width": 700, "height": 3 * lane, "layer": layers}
    return {
        "facet": {"row": row},
        "spec": inner,
        "spacing": 12,
        "data": {"name": "bars"},
        "datasets": _plain({"bars": records}),
    }


def beside(charts: Sequence[Spec], arms: Sequence[str], columns: int) -> Spec:
    """Charts of the same arms as one, with a legend: for a picture, as a page has a legend of its own."""
    inner = [_alone(chart, arms, first=number == 0) for number, chart in enumerate(charts)]
    width = 760 if columns == 1 else 470
    return {"concat": [{**chart, "width": width} for chart in inner], "columns": columns, "spacing": 28}


def _alone(chart: Spec, arms: Sequence[str], first: bool) -> Spec:
    """With its numbers inside its layers; without layers that have none, whose scales would have no end."""
    shown: Spec = {"orient": "top", "title": None, "values": list(arms), "symbolOpacity": 1, "labelLimit": 260}
    layers = []
    for layer in chart["layer"]:
        name = layer["data"].get("name")
        if name is not None:
            if not chart["datasets"][name]:
                continue
            layer = {**layer, "data": {"values": chart["datasets"][name]}}
        encoding = {**layer["encoding"]}
        for key in {"color", "shape"} & encoding.keys():
            encoding[key] = {**encoding[key], "legend": shown if first else None}
        layer = {**layer, "encoding": encoding}
        layers.append(layer)
    return {key: value for key, value in chart.items() if key not in ("autosize", "datasets")} | {"layer": layers}


def with_kinds(layer: Spec) -> Spec:
    """The same for the kinds of work in a timeline."""
    if (work := layer["encoding"].get("color", {})).get("field") != "kind":
        return layer
    shown = {**work, "legend": {"orient": "top", "title": None, "offset": 4}}
    return {**layer, "encoding": {**layer["encoding"], "color": shown}}


def titled(chart: Spec, title: str, facts: Sequence[str]) -> Spec:
    return {**chart, "title": {"text": title, "subtitle": list(facts), "offset": 14}}


def _fitted() -> Spec:
    return {"autosize": {"type": "fit-x", "contains": "padding"}}


def _plain(datasets: Mapping[str, Records]) -> dict[str, list[dict[str, Any]]]:
    return {name: [dict(record) for record in records] for name, records in datasets.items()}


def _filtered(name: str, test: str, mark: Spec, encoding: Spec) -> Spec:
    return {"name": name, "transform": [{"filter": test}], "mark": mark, "encoding": encoding}


def _base() -> Spec:
    one = {"datum": 1, "type": "quantitative"}
    return {"data": {"values": [{}]}, "mark": {"type": "rule", "style": "base", "aria": False}, "encoding": {"y": one}}


def _told() -> Spec:
    return {"description": {"field": "title", "type": "nominal"}}


def _colour(looks: Mapping[str, Look]) -> Spec:
    scale = {"domain": list(looks), "range": [look.colour for look in looks.values()]}
    return {"field": "arm", "type": "nominal", "scale": scale, "legend": None}


def _by_fill(looks: Mapping[str, Look], solid: Any, other: Any) -> Spec:
    scale = {"domain": list(looks), "range": [solid if look.fill == "solid" else other for look in looks.values()]}
    return {"field": "arm", "type": "nominal", "scale": scale, "legend": None}


def _line(looks: Mapping[str, Look]) -> Spec:
    return {"color": _colour(looks), "strokeDash": _by_fill(looks, [1, 0], [6, 4])}


def _point(looks: Mapping[str, Look]) -> Spec:
    shapes = {"domain": list(looks), "range": [SHAPES[look.marker] for look in looks.values()]}
    shape = {"field": "arm", "type": "nominal", "scale": shapes, "legend": None}
    return {"color": _colour(looks), "shape": shape, **_told()}


def _bar(looks: Mapping[str, Look]) -> Spec:
    pale = [arm for arm, look in looks.items() if look.fill != "solid"]
    test = {"field": "arm", "oneOf": pale}
    return {"color": _colour(looks), "fillOpacity": {"condition": {"test": test, "value": 0.3}, "value": 1}, **_told()}


def _lookup(names: Mapping[float, str]) -> str:
    """An expression that names a place."""
    found = "''"
    for place, name in reversed(list(names.items())):
        quoted = name.replace("\\", "\\\\").replace("'", "\\'")
        found = f"abs(datum.value - {place!r}) < {abs(place) * 1e-6 + 1e-9!r} ? '{quoted}' : {found}"
    return found
