"""Match against an oracle that tries every cut, over trees of conversations.

A conversation continues another, edits it in its middle, or repeats it; two producers write; it is
read in one step or in chunks, with cuts inside the steps; windows are small and large, one or
several. The oracle knows the text, rows and provenance of everything that was published.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
from made_by_hand import Made, producers_of

from kvplane.pack import PrefixCache
from kvplane.storage import MemoryStorage

COUNTS = [1, 7, 31, 33, 64, 200, 255, 256, 257, 512, 700]
MODELS = {
    windows: (
        Made(*windows, max_context=1 << 14),
        Made(*windows, max_context=1 << 14, attention="physical"),
    )
    for windows in [(32, None), (64, 33, None), (300, None), (2048, 128, None), (40, 8), (None,)]
}


def published(cache, models, texts, cuts, draw):
    """One more conversation: what it read is added to `texts`, what it published to `cuts`."""
    numerics = draw(st.integers(0, 1))
    made = models[numerics]
    producer = len(texts) + 1
    base = draw(st.sampled_from(texts)) if texts and draw(st.booleans()) else []
    keep = draw(st.sampled_from([len(base), len(base) // 2, max(0, len(base) - 1)]))
    _, loaded = cache.load([*base[:keep], 9], made.store, remember=True)
    session = made.store.open([]) if loaded is None else loaded.session
    ids = base[: session.position]
    made_by, canonical = origin_of(cuts, ids, session, numerics) if ids else ([], 0)
    for _ in range(draw(st.integers(1, 3))):
        more = [draw(st.integers(0, 2))] * draw(st.sampled_from(COUNTS))
        first, stop = len(ids), len(ids) + len(more)
        chunk = draw(st.sampled_from([256, 1 << 14]))
        wished = sorted({draw(st.integers(first + 1, stop)), stop})
        made.extend(session, more, producer=producer, chunk=chunk, capture=wished[:1])
        ids = ids + more
        made_by += [(producer, numerics)] * len(more)
        canonical = grown(canonical, first, stop, chunk, made_by)
        for at in wished if draw(st.booleans()) else wished[-1:]:
            cut, _ = cache.publish(session, position=at)
            entry = (tuple(ids[:at]), tuple(made_by[:at]), min(canonical, at - at % 256))
            if cut is not None:
                cuts.append(entry)
    session.close()
    texts.append(ids)


def origin_of(cuts, ids, session, numerics):
    """Who made the rows of a loaded session, and how far they are canonical."""
    found = producers_of(session)

    def fits(cut):
        makers = [producer for producer, _ in cut[1]]
        held = all(makers[len(makers) - len(rows) :] == rows for rows in found.values())
        return list(cut[0]) == ids and held

    def preferred(cut):
        return {made for _, made in cut[1]} == {numerics}, cut[2]

    best = max(filter(fits, cuts), key=preferred)
    return list(best[1]), best[2]


def grown(canonical, first, stop, chunk, made_by):
    """How far rows are canonical after positions [first, stop) were read in chunks."""
    own = {numerics for _, numerics in made_by[:stop]}
    while chunk == 256 and canonical == first and first % 256 == 0 and stop - first >= 256:
        if len(own) > 1:
            break
        first = canonical = first + 256
    return canonical


@settings(max_examples=80)
@given(data=st.data())
def test_match_gives_the_deepest_usable_cut_and_load_its_producers_rows(data):
    models = MODELS[data.draw(st.sampled_from(sorted(MODELS, key=str)))]
    cache = PrefixCache(MemoryStorage(), models[0].fingerprint)
    texts, cuts = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        published(cache, models, texts, cuts, data.draw)
    prompt = data.draw(st.sampled_from(texts))
    prompt = prompt[: data.draw(st.integers(0, len(prompt)))]
    prompt = prompt + [data.draw(st.integers(0, 2))] * data.draw(st.sampled_from([0, 1, 2, 300]))
    reader = data.draw(st.integers(0, 1))
    fits = [c for c in cuts if len(c[0]) < len(prompt) and tuple(prompt[: len(c[0])]) == c[0]]
    deepest = max((len(c[0]) for c in fits), default=0)
    strict = [
        c for c in fits if c[2] == len(c[0]) and {numerics for _, numerics in c[1]} == {reader}
    ]
    store = models[reader].store
    match = cache.match(prompt, store)

    assert deepest == match.position
    assert (match.reason == "") == (match.position >= len(prompt) - 1)
    assert max((len(c[0]) for c in strict), default=0) == (
        cache.match(prompt, store, strict=True).position
    )
    _, loaded = cache.load(prompt, store)
    if deepest == 0:
        assert loaded is None
        return
    candidates = {tuple(p for p, _ in c[1]) for c in fits if len(c[0]) == deepest}
    for layer, made_by in producers_of(loaded.session).items():
        # byte for byte what one cut's producers had, in every layer, never a mixture
        candidates = {c for c in candidates if list(c[len(c) - len(made_by) :]) == made_by}
        assert candidates, layer
    loaded.session.close()
