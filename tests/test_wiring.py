"""Wirings as text and as a table."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ladder.errors import LadderError
from ladder.wiring import EXAMPLES, Out, SubBlock, Wiring, canonical, independent, layer_cycle, row

REDUCE, HOLD, LOCAL = Out.REDUCE, Out.HOLD, Out.LOCAL

# The design's table: (attention's lag and out, MLP's lag and out) of the first three layers; sums of twelve layers
TABLE = {
    "standard": ([(0, REDUCE, 0, REDUCE), (0, REDUCE, 0, REDUCE), (0, REDUCE, 0, REDUCE)], 24),
    "parallel": ([(0, HOLD, 0, REDUCE), (0, HOLD, 0, REDUCE), (0, HOLD, 0, REDUCE)], 12),
    "ladder": ([(1, REDUCE, 1, REDUCE), (1, REDUCE, 1, REDUCE), (1, REDUCE, 1, REDUCE)], 24),
    "ladder-2": ([(2, REDUCE, 2, REDUCE), (2, REDUCE, 2, REDUCE), (2, REDUCE, 2, REDUCE)], 24),
    "ladder-3": ([(3, REDUCE, 3, REDUCE), (3, REDUCE, 3, REDUCE), (3, REDUCE, 3, REDUCE)], 24),
    "ladder-1-2": ([(1, REDUCE, 2, REDUCE), (1, REDUCE, 2, REDUCE), (1, REDUCE, 2, REDUCE)], 24),
    "ladder-2-1": ([(2, REDUCE, 1, REDUCE), (2, REDUCE, 1, REDUCE), (2, REDUCE, 1, REDUCE)], 24),
    "ladder-0-1": ([(0, REDUCE, 1, REDUCE), (0, REDUCE, 1, REDUCE), (0, REDUCE, 1, REDUCE)], 24),
    "ladder-10-0": ([(10, REDUCE, 0, REDUCE), (10, REDUCE, 0, REDUCE), (10, REDUCE, 0, REDUCE)], 24),
    "desync-1x": ([(0, REDUCE, 0, REDUCE), (0, REDUCE, 0, REDUCE), (0, REDUCE, 0, REDUCE)], 24),
    "desync-2x": ([(0, LOCAL, 0, REDUCE), (0, LOCAL, 0, REDUCE), (0, LOCAL, 0, REDUCE)], 12),
    "desync-3x": ([(0, LOCAL, 0, LOCAL), (0, REDUCE, 0, LOCAL), (0, LOCAL, 0, REDUCE)], 8),
    "desync-4x": ([(0, LOCAL, 0, LOCAL), (0, LOCAL, 0, REDUCE), (0, LOCAL, 0, LOCAL)], 6),
    "desync-5x": ([(0, LOCAL, 0, LOCAL), (0, LOCAL, 0, LOCAL), (0, REDUCE, 0, LOCAL)], 5),
    "desync-5x-local": ([(0, LOCAL, 0, LOCAL), (0, LOCAL, 0, LOCAL), (0, REDUCE, 0, LOCAL)], 4),
    "desync-5x-2-local": ([(2, LOCAL, 2, LOCAL), (2, LOCAL, 2, LOCAL), (2, REDUCE, 2, LOCAL)], 4),
    "parallel-1": ([(1, HOLD, 1, REDUCE), (1, HOLD, 1, REDUCE), (1, HOLD, 1, REDUCE)], 12),
    "parallel-3": ([(3, HOLD, 3, REDUCE), (3, HOLD, 3, REDUCE), (3, HOLD, 3, REDUCE)], 12),
    "desync-2x-1": ([(1, LOCAL, 1, REDUCE), (1, LOCAL, 1, REDUCE), (1, LOCAL, 1, REDUCE)], 12),
    "desync-3x-2": ([(2, LOCAL, 2, LOCAL), (2, REDUCE, 2, LOCAL), (2, LOCAL, 2, REDUCE)], 8),
    "none": ([(0, LOCAL, 0, LOCAL), (0, LOCAL, 0, LOCAL), (0, LOCAL, 0, LOCAL)], 0),
}

PATTERNS = {
    "ladder": ["ladder"] * 6,
    " ladder\n": ["ladder"] * 6,
    "standard:4 ladder:2": ["standard"] * 4 + ["ladder"] * 2,
    "standard:2 ladder-1:1 standard:3": ["standard"] * 2 + ["ladder"] + ["standard"] * 3,
    "ladder:2  ladder:4": ["ladder"] * 6,
    "standard:2 ladder": ["standard"] * 2 + ["ladder"] * 4,
    "ladder standard:1": ["ladder"] * 5 + ["standard"],
    "standard:1 ladder parallel-1:2": ["standard"] + ["ladder"] * 3 + ["parallel-1"] * 2,
    "ladder@3-5": ["standard"] * 3 + ["ladder"] * 3,
    "ladder@5": ["standard"] * 5 + ["ladder"],
    "ladder standard@0,4-5": ["standard", "ladder", "ladder", "ladder", "standard", "standard"],
    "ladder-2@0 none@4-4,1": ["ladder-2", "none", "standard", "standard", "none", "standard"],
    "parallel ladder@0 desync-2x@1,3": ["ladder", "desync-2x", "parallel", "desync-2x", "parallel", "parallel"],
}

REFUSED = {  # for six layers: the text, and what the message names
    "": "empty",
    "  ": "empty",
    "laddr": "'laddr'",
    "Ladder": "'Ladder'",
    "ladder-": "'ladder-'",
    "ladder-x": "'ladder-x'",
    "ladder--1": "'ladder--1'",
    "ladder-01": "'ladder-01'",
    "ladder-1-2-3": "'ladder-1-2-3'",
    "desync-0x": "'desync-0x'",
    "desync-2x-": "'desync-2x-'",
    "desync-2x-x": "'desync-2x-x'",
    "desync-2x-1-1": "'desync-2x-1-1'",
    "desync-2x-99999": "'desync-2x-99999'",
    "desync-3x-locally": "'desync-3x-locally'",
    "desync-3x-local-1": "'desync-3x-local-1'",
    "desync-local": "'desync-local'",
    "ladder-2-local": "'ladder-2-local'",
    "parallel-": "'parallel-'",
    "parallel-01": "'parallel-01'",
    "parallel-1-2": "'parallel-1-2'",
    "parallel-99999": "'parallel-99999'",
    "desync-2": "'desync-2'",
    "desync": "'desync'",
    "standard:3": "3 layers",
    "standard:3 ladder:4": "'standard:3 ladder:4'",
    "ladder:99999999999": "'ladder:99999999999'",
    "ladder:0 standard:6": "'ladder:0'",
    "ladder:-1 standard:7": "'ladder:-1'",
    "ladder:x": "'ladder:x'",
    "ladder: standard:6": "'ladder:'",
    "standard:3 laddr:3": "'laddr'",
    "standard:3 laddr": "'laddr'",
    "standard:6 ladder": "no layer of the model's 6 to 'ladder'",
    "standard:7 ladder": "more than the model's 6",
    "standard:1 ladder parallel": "'parallel' needs a count",
    "standard:3 ladder@3-5": "'ladder@3-5' cannot stand beside NAME:COUNT",
    "standard ladder": "'ladder'",
    "ladder@6": "'6'",
    "ladder@4-6": "'4-6'",
    "ladder@4-3": "'4-3'",
    "ladder@": "''",
    "ladder@1,": "''",
    "ladder@-1": "'-1'",
    "ladder@1-2-3": "'1-2-3'",
    "ladder@a": "'a'",
    "ladder-99999": "'ladder-99999'",
    "desync-9999999999x": "'desync-9999999999x'",
    "ladder-1\u0662": "'ladder-1\u0662'",
    "ladder@\u0663": "'\u0663'",
    "@3": "''",
    "laddr@3": "'laddr'",
    "ladder@1,0-2": "layer 1",
    "ladder@1 parallel@1": "layer 1",
    "ladder\nx@1": "'x'",
}

lags = st.integers(0, 12)
names = st.one_of(
    st.sampled_from(("standard", "parallel", "ladder", "none")),
    st.builds("ladder-{}".format, lags),
    st.builds("ladder-{}-{}".format, lags, lags),
    st.builds("parallel-{}".format, lags),
    st.builds("desync-{}x".format, st.integers(1, 12)),
    st.builds("desync-{}x-{}".format, st.integers(1, 12), lags),
    st.builds("desync-{}x-local".format, st.integers(1, 12)),
    st.builds("desync-{}x-{}-local".format, st.integers(1, 12), lags),
)


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name: str) -> None:
    layers, all_reduces = TABLE[name]
    expected = [(SubBlock(a, out_a), SubBlock(m, out_m)) for a, out_a, m, out_m in layers]
    wiring = Wiring.parse(name, 12)
    assert list(wiring.sub_blocks()[:3]) == expected
    assert len(wiring.sub_blocks()) == 12
    assert wiring.all_reduces() == all_reduces


@pytest.mark.parametrize("pattern, expected", [
    ("standard", "...."), ("parallel", ".b.b"), ("ladder", ".bbb"), ("ladder-0-1", ".b.b"), ("ladder-1-0", "..b."),
    ("parallel-1", ".bbb"), ("desync-2x", "...."), ("desync-2x-1", "..b."), ("none", "...."),
    ("standard:1 ladder:1", "..bb"), ("ladder:1 standard:1", ".b.."),
])  # fmt: skip
def test_what_may_run_beside_the_one_before_it(pattern: str, expected: str) -> None:
    blocks = [block for layer in Wiring.parse(pattern, 2).sub_blocks() for block in layer]
    assert independent(blocks) == [letter == "b" for letter in expected]


def test_a_cycle_starts_anew_with_its_run() -> None:
    wiring = Wiring.parse("desync-3x:2 ladder:2 desync-3x-local:2", 6)
    run = [(SubBlock(0, LOCAL), SubBlock(0, LOCAL)), (SubBlock(0, REDUCE), SubBlock(0, LOCAL))]
    assert list(wiring.sub_blocks()) == [*run, *[(SubBlock(1, REDUCE),) * 2] * 2, *run]
    assert Wiring.parse("desync-3x:1 desync-3x:3", 4) == Wiring.parse("desync-3x", 4)


@pytest.mark.parametrize("layers, pattern, local, outs", [
    (2, "desync-3x", "desync-3x-local", "llr l"), (2, "desync-5x-1", "desync-5x-1-local", "llll"),
    (3, "desync-4x", "desync-4x-local", "lllr ll"), (1, "desync-9x", "desync-9x-local", "ll"),
    (3, "ladder:2 desync-3x:1", "ladder:2 desync-3x-local:1", "rrrr ll"),
])  # fmt: skip
def test_the_last_sub_block_of_desync_reduces(layers: int, pattern: str, local: str, outs: str) -> None:
    """As the authors' last MLP does; `-local` is the cycle alone. Both have the lags of the row."""
    letters, full = outs.replace(" ", ""), {"l": LOCAL, "r": REDUCE}
    ended, ends = (
        [block for layer in Wiring.parse(text, layers).sub_blocks() for block in layer] for text in (local, pattern)
    )
    assert [block.out for block in ended] == [full[letter] for letter in letters]
    assert [block.out for block in ends] == [full[letter] for letter in letters[:-1]] + [REDUCE]
    assert [block.lag for block in ended] == [block.lag for block in ends]


@pytest.mark.parametrize("layers, pattern", [
    (2, "desync-4x"), (3, "desync-3x-2"), (3, "desync-2x"),  # a cycle ends where the model does
    (4, "desync-3x:1 ladder:3"), (4, "desync-3x:3 none:1"),  # others follow, and may end local
])  # fmt: skip
def test_other_ends_are_as_the_row_says(layers: int, pattern: str) -> None:
    local = re.sub(r"(desync[-0-9x]*)", r"\1-local", pattern)
    assert Wiring.parse(local, layers).sub_blocks() == Wiring.parse(pattern, layers).sub_blocks()


@pytest.mark.parametrize("text", PATTERNS)
def test_patterns(text: str) -> None:
    wiring = Wiring.parse(text, 6)
    assert list(wiring.layers) == PATTERNS[text]
    assert Wiring.parse(str(wiring), 6) == wiring


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("ladder-1", "ladder"),
        ("parallel-0", "parallel"),
        ("parallel-1", "parallel-1"),
        ("desync-10x", "desync-10x"),
        ("desync-3x-10", "desync-3x-10"),
        ("desync-10x-0", "desync-10x"),
        ("desync-10x-0-local", "desync-10x-local"),
        ("desync-3x-10-local", "desync-3x-10-local"),
        ("desync-2x-local", "desync-2x"),
        ("desync-2x-3-local", "desync-2x-3"),
        ("desync-1x-3-local", "ladder-3"),
        ("desync-2x-0", "desync-2x"),
        ("desync-2x-1", "desync-2x-1"),
        ("ladder-0", "standard"),
        ("ladder-1-1", "ladder"),
        ("ladder-0-0", "standard"),
        ("ladder-2-2", "ladder-2"),
        ("ladder-2-1", "ladder-2-1"),
        ("ladder-10-10", "ladder-10"),
        ("desync-1x", "standard"),
    ],
)
def test_aliases(alias: str, name: str) -> None:
    assert canonical(alias) == name
    assert Wiring((alias,)) == Wiring((name,))
    assert row(alias) == row(name)


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str) -> None:
    with pytest.raises(LadderError) as caught:
        Wiring.parse(text, 6)
    message = str(caught.value)
    assert REFUSED[text] in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "wrong", "near"),
    [
        ("laddr", "laddr", "ladder"),
        ("standard:3 laddr:3", "laddr", "ladder"),
        ("ladder:3 standart:3", "standart", "standard"),
        ("ladder paralel@1-2", "paralel", "parallel"),
        ("desync2x@0,5", "desync2x", "desync-2x"),
        ("ladder:2 paralel-1:4", "paralel-1", "parallel-1"),
    ],
)
def test_the_nearest_name_is_that_of_the_wrong_part(text: str, wrong: str, near: str) -> None:
    with pytest.raises(LadderError, match=f"^unknown wiring '{wrong}': known are .*; the nearest is '{near}'$"):
        Wiring.parse(text, 6)


def test_every_example_is_a_name() -> None:
    assert [canonical(name) for name in EXAMPLES] == list(EXAMPLES)


def test_the_constructor_refuses_unknown_names_too() -> None:
    with pytest.raises(LadderError, match="'laddr'"):
        Wiring(("ladder", "laddr"))


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (["ladder"] * 3, "ladder"),
        (["ladder-1", "ladder", "ladder-1-1"], "ladder"),
        (["standard", "ladder", "ladder"], "standard:1 ladder:2"),
        (["none", "desync-2x", "none"], "none:1 desync-2x:1 none:1"),
    ],
)
def test_printing(layers: list[str], text: str) -> None:
    assert str(Wiring(tuple(layers))) == text


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(names, min_size=1, max_size=20))
def test_what_is_printed_reads_back(layers: list[str]) -> None:
    wiring = Wiring(tuple(layers))
    assert Wiring.parse(str(wiring), len(layers)) == wiring
    assert Wiring.parse(" ".join(f"{name}:1" for name in layers), len(layers)) == wiring
    assert Wiring.parse(" ".join(f"{name}@{layer}" for layer, name in enumerate(layers)), len(layers)) == wiring
    assert all(canonical(name) == name for name in wiring.layers)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.text("ladersty-nox0123:@, \n", max_size=20), st.integers(1, 5))
def test_any_text_is_read_or_refused(text: str, layers: int) -> None:
    try:
        wiring = Wiring.parse(text, layers)
    except LadderError as error:
        assert "\n" not in str(error)
    else:
        assert len(wiring.layers) == layers


@pytest.mark.parametrize(
    ("value", "layers"),
    [
        (None, []),
        (0, []),
        (2, [3, 4]),
        (5, [0, 1, 2, 3, 4]),
        ([], []),
        ([0, 4], [0, 4]),
        ((3, 1), [1, 3]),
    ],
)
def test_ladder_layers(value: object, layers: list[int]) -> None:
    wiring = Wiring.from_ladder_layers(value, 5)
    assert list(wiring.layers) == ["ladder" if layer in layers else "standard" for layer in range(5)]
    assert wiring.is_standard == (not layers)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (True, "True"),
        (False, "False"),
        (6, "6"),
        (-1, "-1"),
        ([0, 5], "layer 5"),
        ([-1], "layer -1"),
        ([0, True], "True"),
        (["0"], "'0'"),
        ("ladder\n", r"'ladder\n'"),
        (2.0, "2.0"),
        ({"0": 1}, "{'0': 1}"),
    ],
)
def test_ladder_layers_refused(value: object, named: str) -> None:
    with pytest.raises(LadderError) as caught:
        Wiring.from_ladder_layers(value, 5)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


# Layers of three sub-blocks (attention, cross-attention, MLP): (lag and out) of each in the first two layers
THREE = {
    "standard": [(0, REDUCE)] * 6,
    "parallel": [(0, HOLD), (0, HOLD), (0, REDUCE)] * 2,
    "parallel-2": [(2, HOLD), (2, HOLD), (2, REDUCE)] * 2,
    "ladder": [(1, REDUCE)] * 6,
    "ladder-2": [(2, REDUCE)] * 6,
    "ladder-1-2": [(1, REDUCE), (1, REDUCE), (2, REDUCE)] * 2,
    "ladder-0-1": [(0, REDUCE), (0, REDUCE), (1, REDUCE)] * 2,
    "desync-2x": [(0, LOCAL), (0, REDUCE)] * 3,
    "desync-3x-1": [(1, LOCAL), (1, LOCAL), (1, REDUCE)] * 2,
    "desync-4x": [(0, LOCAL), (0, LOCAL), (0, LOCAL), (0, REDUCE), (0, LOCAL), (0, REDUCE)],
    "desync-4x-local": [(0, LOCAL), (0, LOCAL), (0, LOCAL), (0, REDUCE), (0, LOCAL), (0, LOCAL)],
    "none": [(0, LOCAL)] * 6,
}


@pytest.mark.parametrize("name", THREE)
def test_layers_of_three_sub_blocks(name: str) -> None:
    found = [(block.lag, block.out) for layer in Wiring((name, name)).layer_blocks(3) for block in layer]
    assert found == THREE[name]


@pytest.mark.parametrize("name", TABLE)
def test_layers_of_two_sub_blocks_are_those_of_a_decoder(name: str) -> None:
    assert layer_cycle(name, 2) == row(name)
    wiring = Wiring((name,) * 5 + ("ladder",) + (name,) * 3)
    assert wiring.layer_blocks(2) == wiring.sub_blocks()


def test_a_cycle_starts_anew_with_its_run_whatever_a_layer_has() -> None:
    found = Wiring.parse("desync-2x:1 ladder:1 desync-2x:1", 3).layer_blocks(3)
    assert [block.out for block in found[0]] == [LOCAL, REDUCE, LOCAL]
    assert [block.out for block in found[2]] == [LOCAL, REDUCE, REDUCE]  # the model's last one
