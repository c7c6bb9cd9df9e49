"""The page and the command of `kvplane inspect`: escaped, whole, small, and the same in brief."""

import base64
import dataclasses
import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from kvplane.cli import REFUSED, main
from kvplane.inspect import found, inspected, markup, page
from kvplane.inspect.dial import dial
from kvplane.inspect.strips import COLUMNS, _coarse
from kvplane.storage import open_storage
from saved_roots import make_root

VOID = {"meta", "br", "input"}
LIMIT_NBYTES = 2_000_000


class Checked(HTMLParser):
    """Refuses what is not closed, and notes what would be loaded."""

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in {"src", "href", "srcset"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, _):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(text):
    parser = Checked()
    parser.feed(text)
    assert [] == parser.open
    return parser


@pytest.fixture
def root(tmp_path):
    make_root(tmp_path / "root", lengths=(300, 700))
    return tmp_path / "root"


def page_of(root, name="b"):
    storage = open_storage(root)
    return page(inspected(storage, found(storage, name)))


def test_the_page_is_whole_loads_nothing_and_is_small(root):
    text = page_of(root)
    parser = checked(text)

    assert [] == parser.loads
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", text)
    assert "default-src 'none'" in text
    assert LIMIT_NBYTES > len(text.encode())


def test_what_a_pack_says_is_text_never_markup(root):
    storage = open_storage(root)
    looked = inspected(storage, found(storage, "b"))
    evil = "</script><img src=x onerror=alert(1)>"
    content = dataclasses.replace(
        looked.content,
        tokenizer=evil,
        parts={**looked.content.parts, "weights": evil, "config": {evil: evil}},
    )
    text = page(dataclasses.replace(looked, name=evil, content=content, problems=(evil,)))

    assert "img" not in checked(text).tags
    assert checked(page_of(root)).tags.count("script") == checked(text).tags.count("script")


def test_a_kind_that_ends_a_script_does_not(root, monkeypatch):
    monkeypatch.setattr(markup, "heat_facts", lambda _: {"kind": "</script><video>"})

    assert "video" not in checked(page_of(root)).tags


def test_a_cell_of_the_heat_map_is_a_byte(root):
    text = page_of(root)
    facts = json.loads(re.search(r'id="facts">(.*?)</script>', text)[1])
    cells = base64.b64decode(facts["layers"][0]["key"]["cells"])

    assert (700, 3, 234) == (facts["position"], facts["width"], facts["columns"])
    assert [0, 1, 2, 3, 4, 5] == [layer["layer"] for layer in facts["layers"]]
    assert facts["columns"] == len(cells)
    # layer 0 is a ring of 32: the columns before it are empty
    assert {255} == set(cells[:222])
    assert {0, 254} <= set(cells[222:])


def test_damage_is_said_first(root):
    for blob in (root / "blobs").glob("*/*"):
        blob.write_bytes(b"")
    text = page_of(root)

    assert "5 of 5 blobs are damaged or missing" in text
    assert text.index("What is wrong") < text.index("Planes")


def test_an_empty_session_has_a_page(tmp_path):
    make_root(tmp_path, lengths=(0,), cuts=())

    assert "No rows are held" in page_of(tmp_path, "a")


# the drawing


def arcs(text):
    return text.count('class="live"')


def test_a_dial_draws_the_live_rows_the_oldest_and_the_next():
    text = dial(capacity=8, length=5, origin_physical=6, label="five of eight", segments=96)
    checked(text)

    assert 5 == arcs(text)
    assert (1, 1) == (text.count('class="oldest"'), text.count('class="next"'))


def test_a_dial_of_many_rows_has_few_arcs():
    text = dial(capacity=2048, length=2048, origin_physical=0, label="", lines=("<b>",))

    assert 96 == arcs(text)
    assert "&lt;b&gt;" in text


def test_an_empty_dial_has_no_oldest():
    text = dial(capacity=8, length=0, origin_physical=0, label="")

    assert (0, 0) == (arcs(text), text.count('class="oldest"'))


def test_a_strip_of_very_many_pieces_is_told_by_columns():
    runs = [("own" if n % 2 else "shared", 3 * n, 3 * n + 3) for n in range(1000)]
    coarse = _coarse(runs, 3000)

    assert COLUMNS >= len(coarse)
    assert (0, 3000) == (coarse[0][1], coarse[-1][2])
    assert all(one[2] == two[1] for one, two in pairwise(coarse))


# the command


def test_the_command_writes_the_page(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    assert 0 == main(["inspect", "b", "--root", str(root)])
    assert (
        page_of(root).partition("<footer>")[0]
        == ((tmp_path / "b.html").read_text().partition("<footer>")[0])
    )
    assert "written: b.html" in capsys.readouterr().err


def test_in_brief_it_says_rings_plan_sharing_and_who_made_the_rows(root, capsys):
    assert 0 == main(["inspect", f"{root}/sessions/b.json", "--text"])

    printed = capsys.readouterr().out
    assert re.search(r"s32\.2x4x4\.f16 +\[668, 700\) +32 of 32 +28 +21 .*yes", printed)
    assert "every byte of 5 blobs is what its name says" in printed
    assert "with session a" in printed
    assert "positions [0, 700): attention blocked" in printed


def test_a_root_with_one_session_will_do_and_one_with_more_is_refused(tmp_path, root, capsys):
    make_root(tmp_path / "one", lengths=(40,), cuts=())

    assert 0 == main(["inspect", str(tmp_path / "one"), "--text"])
    assert "session a" in capsys.readouterr().out
    assert REFUSED == main(["inspect", str(root)])
    assert "expected one of its sessions" in capsys.readouterr().err


def test_damage_is_an_exit_code_and_a_page(root, tmp_path, capsys):
    for blob in (root / "blobs").glob("*/*"):
        blob.write_bytes(b"")
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "a", "--root", str(root), "--out", str(tmp_path / "a.html")])

    assert 1 == ended.value.code
    assert "damaged or missing" in (tmp_path / "a.html").read_text()
    with pytest.raises(SystemExit):
        main(["inspect", "a", "--root", str(root), "--text"])
    assert "its bytes" in capsys.readouterr().out


def test_a_page_that_cannot_be_written_is_refused(root, tmp_path, capsys):
    assert REFUSED == main(["inspect", "b", "--root", str(root), "--out", f"{tmp_path}/no/b.html"])
    assert "No such file" in capsys.readouterr().err
