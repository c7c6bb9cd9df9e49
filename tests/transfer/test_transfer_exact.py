"""A session goes on in another process bit for bit: every link, every gate, whole and delta."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from handoffs import moved

from gates import LAYOUTS
from hybrid_model import HybridModel, text
from kvplane import Layout
from kvplane.testing.certificates import Authority
from kvplane.transfer import Listener, connect, receive, send

TESTS = Path(__file__).parents[1]
WINDOW = 64
# E's positions around one and two windows, and what a delta is sent against
WHOLE = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129)
DELTA = ((257, 256), (300, 256), (513, 512), (545, 512), (577, 512))
LINKS = ("TCP", "TLS", "Unix")
DTYPES = ("float16", "bfloat16")
# the next 64 tokens: alone, as an answer is said, then a few at a time
CALLS = [1] * 6 + [29] * 2
OTHER = {Layout.TOKEN_MAJOR: Layout.HEAD_MAJOR, Layout.HEAD_MAJOR: Layout.TOKEN_MAJOR}


def layouts_of(number, *, swapped):
    layout = LAYOUTS[number % 4]
    return {kind: OTHER[each] for kind, each in layout.items()} if swapped else layout


def cases():
    """(link, dtype, position, cut), in the order in which both processes take them."""
    plans = [(position, 0) for position in WHOLE] + list(DELTA)
    return [(*case, *plan) for case in itertools.product(LINKS, DTYPES) for plan in plans]


def model_of(dtype):
    return HybridModel(4, WINDOW, 32, dtype=dtype)


def went_on(model, session):
    """Logits of the next 64 tokens."""
    found = []
    for count in CALLS:
        first = session.position
        found.append(model.call(session, text(first + count)[first:]))
    return torch.cat(found)


def facts_of(session):
    """Rows, cursors and ids of a session."""
    rows = {}
    for group in session.groups:
        for layer in group.layers:
            live = session.live(layer)
            spans = session.spans(layer, live.start, live.stop)
            rows[layer] = [torch.cat(parts) for parts in zip(*spans, strict=True)]
    cursors = {name: cursor.as_tuple() for name, cursor in session.cursors.items()}
    return {"rows": rows, "cursors": cursors, "tokens": session.tokens}


def take_all(folder, identity):
    """What the other process does: receive every session, in planes of other layouts, and go on."""
    torch.set_num_threads(1)
    listeners = {
        "TCP": Listener("127.0.0.1:0"),
        "TLS": Listener("127.0.0.1:0", identity=identity),
        "Unix": Listener(f"unix:{folder}/socket"),
    }
    sys.stdout.write(" ".join(listeners[link].address for link in LINKS) + "\n")
    sys.stdout.flush()
    models = {dtype: model_of(dtype) for dtype in DTYPES}
    found = []
    for number, (link, dtype, _, cut) in enumerate(cases()):
        model = models[dtype]
        store = model.store(max_context=1024, layout=layouts_of(number, swapped=True))
        held = []
        if cut:
            held.append(store.open([]))
            model.prefill(held[0], text(cut))
        taken = listeners[link].accept(timeout_s=300)
        received = receive(store, taken, held=held, timeout_s=300, idle_timeout_s=300)
        assert received.acknowledged
        assert received.same_numerics
        facts = facts_of(received.session)
        facts |= {"cut": received.cut, "nbytes": received.nbytes}
        found.append({**facts, "logits": went_on(model, received.session)})
        taken.close()
    for listener in listeners.values():
        listener.close()
    torch.save(found, Path(folder) / "found.pt")


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """By case: what the receiver has, what the sender was told, and the undisturbed session."""
    folder = tmp_path_factory.mktemp("exact")
    authority = Authority(folder / "certificates")
    mine, theirs = authority.identity("sender"), authority.identity("receiver")
    files = [str(path) for path in (theirs.certificate, theirs.key, theirs.authority)]
    code = (
        f"import sys; sys.path[:0] = [{str(TESTS)!r}, {str(Path(__file__).parent)!r}]\n"
        "import test_transfer_exact as test; from pathlib import Path\n"
        "from kvplane.transfer import Identity\n"
        f"files = [Path(name) for name in {files!r}]\n"
        "identity = Identity(certificate=files[0], key=files[1], authority=files[2])\n"
        f"test.take_all({str(folder)!r}, identity)"
    )
    found, undisturbed = {}, {}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        addresses = dict(zip(LINKS, other.stdout.readline().decode().split(), strict=True))
        models = {dtype: model_of(dtype) for dtype in DTYPES}
        for number, case in enumerate(cases()):
            link, dtype, position, _ = case
            model = models[dtype]
            store = model.store(max_context=1024, layout=layouts_of(number, swapped=False))
            session = store.open([])
            model.prefill(session, text(position))
            to = connect(addresses[link], identity=mine if link == "TLS" else None, timeout_s=300)
            sent = send(session, to, chunk=256, timeout_s=300, idle_timeout_s=300)
            to.close()
            found[case] = {**facts_of(session), "sent": sent}
            if case[1:3] not in undisturbed:
                undisturbed[case[1:3]] = went_on(model, session)
            found[case]["logits"] = undisturbed[case[1:3]]
        assert 0 == other.wait(300)
    results = torch.load(folder / "found.pt")
    return {case: (found[case], got) for case, got in zip(cases(), results, strict=True)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("link", LINKS)
def test_rows_cursors_ids_and_the_next_64_tokens_are_the_senders(taken, link, dtype):
    for case, (mine, theirs) in taken.items():
        if case[:2] != (link, dtype):
            continue
        for layer, rows in mine["rows"].items():
            for part, other in zip(rows, theirs["rows"][layer], strict=True):
                assert torch.equal(part.view(torch.int16), other.view(torch.int16)), case

        assert mine["cursors"] == theirs["cursors"]
        assert mine["tokens"] == theirs["tokens"]
        assert sum(CALLS) == len(theirs["logits"])
        assert torch.equal(mine["logits"], theirs["logits"]), case


@pytest.mark.parametrize("link", LINKS)
def test_a_delta_sends_only_what_follows_the_cut(taken, link):
    for case, (mine, theirs) in taken.items():
        if case[0] == link:
            assert case[3] == mine["sent"].cut == theirs["cut"]
            assert case[2] == mine["sent"].tokens
            assert mine["sent"].nbytes == theirs["nbytes"]


PAIRS = [(*pair, "heap") for pair in itertools.product(range(4), range(4))]
PAIRS += [(number, 3 - number, "auto") for number in range(4)]


@pytest.mark.parametrize(("producer", "consumer", "memory"), PAIRS)
def test_every_pair_of_layouts_gives_the_same_bits(producer, consumer, memory):
    model = HybridModel(4, 300, 40, dtype="bfloat16")
    session = model.store(layout=LAYOUTS[producer], memory=memory, slack=3).open([])
    model.prefill(session, text(611))
    store = model.store(layout=LAYOUTS[consumer], memory=memory, slack=3)
    received = moved(session, store, sender={"chunk": 256})
    expected = model.decode(session, text(620)[611:])

    assert received.kept_rotation
    assert torch.equal(expected, model.decode(received.session, text(620)[611:]))
