"""Every rule of a document, broken alone and sealed again by whoever broke it."""

import copy
import json

import pytest
from made_by_hand import Made

from kvplane.errors import PackCorrupt, PackTooLarge, PackVersion
from kvplane.pack import Aux, PrefixCache, save_session
from kvplane.pack.documents import Cut, Node, SavedSession
from kvplane.pack.encoding import canonical, digest, framed, sealed
from kvplane.pack.limits import SPANS, TOKENS
from kvplane.storage import MemoryStorage

MADE = Made(8, None)
FULL, SLIDING = "f0.1x2x2.f32", "s8.1x2x2.f32"
IMAGE, SOUND = Aux(2, 5, "image", "a" * 64), Aux(3, 9, "sound", "b" * 64)
KINDS = {"cut": Cut, "session": SavedSession, "node": Node}


def original():
    """Fields of a cut at 300, a session of 310 and a node."""
    storage = MemoryStorage()
    ids = list(range(310))
    cache = PrefixCache(storage, MADE.fingerprint)
    session = MADE.open(ids[:300])
    cache.publish(session, aux=[SOUND, IMAGE])
    MADE.extend(session, ids[300:])
    save_session(storage, "s", session, MADE.fingerprint, aux=[SOUND, IMAGE], tokenizer="bytes")
    names = {kind: storage.list(f"{kind}s")[0] for kind in KINDS}
    return {kind: json.loads(storage.read(name, limit=1 << 20)) for kind, name in names.items()}


ORIGINAL = original()


def read(kind, fields):
    return KINDS[kind].decoded(sealed(kind, fields), "x")


def at(*path, value):
    """A change: the value at a path of keys."""

    def change(fields):
        for key in path[:-1]:
            fields = fields[key]
        fields[path[-1]] = value

    return change


def without(*path):
    def change(fields):
        for key in path[:-1]:
            fields = fields[key]
        del fields[path[-1]]

    return change


def spans(change):
    def changed(fields):
        change(fields["groups"][FULL]["spans"])

    return changed


def dropped_first(held):
    del held[0]


def repeated(held):
    held.insert(0, held[0])


def crossing(held):
    held[0:2] = [[0, 300, held[0][2]]]


def swapped(held):
    held.reverse()


BOTH = {
    "a field too many": (at("more", value=1), "unknown or missing: more"),
    "a field missing": (without("canonical"), "unknown or missing: canonical"),
    "fingerprint short": (at("fingerprint", value="0" * 63), "fingerprint"),
    "fingerprint upper case": (at("fingerprint", value="A" * 64), "fingerprint"),
    "position a bool": (at("position", value=True), "position"),
    "position negative": (at("position", value=-1), "position"),
    "states no digest": (at("states", value="x"), "states"),
    "groups a list": (at("groups", value=[]), "groups"),
    "groups none": (at("groups", value={}), "groups"),
    "group without an id": (at("groups", "x", value={"first": 0, "spans": []}), "no group's id"),
    "rows with a field too many": (at("groups", FULL, "more", value=1), f"rows of {FULL}"),
    "first above the position": (at("groups", FULL, "first", value=999), "first of"),
    "spans no list": (at("groups", FULL, "spans", value={}), "no list"),
    "span of two": (at("groups", FULL, "spans", 0, value=[0, 256]), "not first, stop and blob"),
    "span of no blob": (at("groups", FULL, "spans", 0, 2, value="x"), "not first, stop and blob"),
    "span of bools": (at("groups", FULL, "spans", 0, 0, value=False), "not first, stop and blob"),
    "span empty": (at("groups", FULL, "spans", 0, 1, value=0), "ascending"),
    "spans with a hole": (spans(dropped_first), "ascending"),
    "spans that overlap": (spans(repeated), "ascending"),
    "spans in another order": (spans(swapped), "ascending"),
    "a span that leaves its block": (spans(crossing), "leaves a block"),
    "spans that end early": (spans(list.pop), "end at"),
    "numerics an object": (at("numerics", value={}), "numerics are no list"),
    "numerics missing": (at("numerics", value=[]), "missing"),
    "numerics without a chunk": (without("numerics", 0, 1, "chunk"), "a run of numerics"),
    "numerics with chunk 0": (at("numerics", 0, 1, "chunk", value=0), "a run of numerics"),
    "numerics nested": (at("numerics", 0, 1, "torch", value=[]), "a run of numerics"),
    "numerics with a bool": (at("numerics", 0, 1, "torch", value=True), "a run of numerics"),
    "numerics that end early": (at("numerics", 0, 0, value=7), "numerics end at 7"),
    "numerics descending": (lambda f: f["numerics"].append([1, {"chunk": 1}]), "ascending"),
    "canonical negative": (at("canonical", value=-256), "canonical"),
    "canonical off the grid": (at("canonical", value=255), "canonical"),
    "canonical above the rows": (at("canonical", value=512), "canonical"),
    "tokens null or short": (at("tokens", value="AAAA"), "whole ids"),
    "tokens too few": (at("tokens", value="AAAAAA=="), "not one a position"),
    "tokens no base64": (at("tokens", value="?"), "base64"),
    "tokens of spare bits": (at("tokens", value="AAAAAB=="), "canonical base64"),
    "tokens a number": (at("tokens", value=1), "no text"),
    "chain no digest": (at("chain", value="x"), "chain"),
    "aux an object": (at("aux", value={}), "aux is no list"),
    "aux of three": (at("aux", 0, value=[0, 1, "image"]), "aux is no list"),
    "aux of nothing": (at("aux", 0, 1, value=2), "aux is no list"),
    "aux without a type": (at("aux", 0, 2, value=""), "aux is no list"),
    "aux without a digest": (at("aux", 0, 3, value="x"), "aux is no list"),
    "aux descending": (lambda f: f["aux"].reverse(), "ascending"),
    "aux twice": (lambda f: f["aux"].append(f["aux"][-1]), "ascending"),
    "aux above the position": (at("aux", 0, value=[400, 401, "image", "a" * 64]), "position"),
}
CUTS = {
    "sliding rows from too early": (at("groups", SLIDING, "first", value=292), "not"),
    "chain null": (at("chain", value=None), "chain"),
    "tokens null": (at("tokens", value=None), "no text"),
}


def other_weights(fields):
    fields["parts"]["weights"] = "other"


def told_again(fields):
    parts = framed(canonical(fields["parts"]))
    fields["fingerprint"] = digest(framed(b"kvplane/fingerprint/1"), parts).hex()


def of_other_layers(fields):
    fields["parts"]["groups"][FULL] = [2]
    fields["parts"]["rotary"] = {"0": None, "2": None}
    told_again(fields)


def of_other_groups(fields):
    fields["groups"]["s9.1x2x2.f32"] = fields["groups"].pop(SLIDING)
    fields["cursors"]["s9.1x2x2.f32"] = fields["cursors"].pop(SLIDING)


def begun_later(fields):
    rows, cursor = fields["groups"][FULL], fields["cursors"][FULL]
    rows["first"] = rows["spans"][0][0] = 5
    cursor.update(origin_logical=5, length=305)


def begun_later_with_its_tokens(fields):
    begun_later(fields)
    fields["canonical"] = 0


def window_short(fields):
    rows, cursor = fields["groups"][SLIDING], fields["cursors"][SLIDING]
    rows.update(first=305, spans=[[305, 310, rows["spans"][0][2]]])
    cursor.update(origin_logical=305, length=5)


SESSIONS = {
    "cursors a list": (at("cursors", value=[]), "cursors"),
    "cursors of other groups": (without("cursors", FULL), "cursors"),
    "cursor with a field too many": (at("cursors", FULL, "more", value=1), "the cursor of"),
    "cursor negative": (at("cursors", SLIDING, "origin_physical", value=-1), "the cursor of"),
    "cursor a bool": (at("cursors", SLIDING, "origin_physical", value=True), "the cursor of"),
    "row outside the ring": (at("cursors", SLIDING, "origin_physical", value=8), "does not fit"),
    "ring without rows": (at("cursors", SLIDING, "capacity", value=0), "does not fit"),
    "ring shorter than its rows": (at("cursors", SLIDING, "capacity", value=7), "does not fit"),
    "origin of other rows": (at("cursors", SLIDING, "origin_logical", value=301), "does not fit"),
    "length of other rows": (at("cursors", SLIDING, "length", value=7), "does not fit"),
    "parts a list": (at("parts", value=[]), "parts"),
    "parts with a field too many": (at("parts", "more", value=1), "parts"),
    "parts of other weights": (other_weights, "do not give its fingerprint"),
    "parts of other layers": (of_other_layers, "other groups than its parts"),
    "groups of another model": (of_other_groups, "not those of the model"),
    "geometry a list": (at("geometry", value=[]), "geometry"),
    "geometry with a field too many": (at("geometry", "more", value=1), "geometry"),
    "geometry without layers": (at("geometry", "layers", value=[]), "geometry"),
    "geometry of a strange kind": (at("geometry", "layers", 0, "kind", value="x"), "geometry"),
    "geometry of text": (at("geometry", "layers", 0, "head_dim", value="2"), "geometry"),
    "geometry of a layer short": (without("geometry", "layers", 0, "kind"), "geometry"),
    "geometry with half a rotary": (at("geometry", "layers", 0, "rotary", value={}), "geometry"),
    "geometry of another dtype": (at("geometry", "dtype", value="float16"), "other groups"),
    "name a number": (at("name", value=1), "name"),
    "tokenizer a number": (at("tokenizer", value=1), "tokenizer"),
    "template a list": (at("template", value=[]), "template"),
    "chain without tokens": (at("tokens", value=None), "chain does not go"),
    "tokens without chain": (at("chain", value=None), "chain does not go"),
    "canonical of a later beginning": (begun_later, "canonical"),
    "tokens from before the beginning": (begun_later_with_its_tokens, "not one a position"),
    "a window that is not whole": (window_short, "is needed"),
}
NODES = {
    "a field too many": (at("more", value=1), "unknown or missing"),
    "chain no digest": (at("chain", value="x"), "chain"),
    "parent no digest": (at("parent", value=None), "parent"),
    "fingerprint no digest": (at("fingerprint", value=1), "fingerprint"),
    "index negative": (at("index", value=-1), "index"),
    "tokens of a part": (at("tokens", value="AAAAAA=="), "not those of a block"),
}
CASES = [
    (kind, name, *case)
    for kind, cases in (
        ("cut", {**BOTH, **CUTS}),
        ("session", {**BOTH, **SESSIONS}),
        ("node", NODES),
    )
    for name, case in cases.items()
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_original_is_read(kind):
    assert sealed(kind, ORIGINAL[kind]) == read(kind, ORIGINAL[kind]).encoded()


@pytest.mark.parametrize(
    ("kind", "change", "what"),
    [(kind, change, what) for kind, _, change, what in CASES],
    ids=[f"{kind}: {name}" for kind, name, _, _ in CASES],
)
def test_a_broken_rule_is_refused_by_what_is_wrong(kind, change, what):
    fields = copy.deepcopy(ORIGINAL[kind])
    change(fields)

    with pytest.raises(PackCorrupt) as refused:
        read(kind, fields)

    assert what in refused.value.what


@pytest.mark.parametrize("kind", KINDS)
def test_another_format_is_called_that(kind):
    with pytest.raises(PackVersion) as refused:
        read(kind, {**ORIGINAL[kind], "format": 2})

    assert 2 == refused.value.got


def test_more_spans_positions_or_ids_than_a_document_holds_are_refused_by_number():
    fields = copy.deepcopy(ORIGINAL["cut"])
    fields["position"] = TOKENS + 1
    with pytest.raises(PackTooLarge, match="position"):
        read("cut", fields)

    many = SPANS // 2 + 1
    fields = copy.deepcopy(ORIGINAL["cut"])
    for rows in fields["groups"].values():
        rows.update(first=0, spans=[[place, place + 1, "a" * 64] for place in range(many)])
    fields["position"] = fields["numerics"][0][0] = many
    with pytest.raises(PackTooLarge) as refused:
        read("cut", fields)
    assert (SPANS, 2 * many) == (refused.value.limit, refused.value.got)


def test_a_cut_at_position_0_is_none():
    fields = copy.deepcopy(ORIGINAL["cut"])
    for rows in fields["groups"].values():
        rows.update(first=0, spans=[])
    fields.update(position=0, numerics=[], canonical=0, tokens="", aux=[])

    with pytest.raises(PackCorrupt, match="position 0"):
        read("cut", fields)


def test_two_runs_of_equal_numerics_are_one_run():
    fields = copy.deepcopy(ORIGINAL["cut"])
    fields["numerics"].insert(0, [100, fields["numerics"][0][1]])

    with pytest.raises(PackCorrupt, match="equal numerics"):
        read("cut", fields)
