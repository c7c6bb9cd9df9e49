"""An inspection in words and numbers: what page and terminal both say."""

from kvplane.inspect.facts import GroupFacts, Inspection
from kvplane.pack.documents import SavedSession


def title_of(found: Inspection) -> str:
    """What was looked at."""
    return f"{found.kind} {found.name}"


def state_of(found: Inspection) -> tuple[bool, str]:
    """Whether all of it is sound, and that in words."""
    if found.num_problems:
        return False, f"{found.num_problems:,} of {found.num_blobs:,} blobs are damaged or missing"
    return True, f"every byte of {found.num_blobs:,} blobs is what its name says"


def facts_of(found: Inspection) -> list[tuple[str, str]]:
    """What the document says of itself, as name and text."""
    content = found.content
    state = content.state
    facts = [
        ("tokens", f"{state.position:,}"),
        ("root", found.root),
        ("fingerprint", state.fingerprint),
        ("canonical", _canonical(state.canonical)),
    ]
    if isinstance(content, SavedSession):
        facts.append(("weights", str(content.parts.get("weights"))))
        names = [name for name in ("adapters", "quantisation") if content.parts.get(name)]
        facts += [(name, str(content.parts[name])) for name in names]
        known = "kept" if content.ids is not None else "not kept"
        facts.append(("token ids", known))
        for name, said in (("tokenizer", content.tokenizer), ("template", content.template)):
            if said is not None:
                facts.append((name, said))
        if content.first_position:
            facts.append(("began at", f"{content.first_position:,}"))
    else:
        facts.append(("chain", content.chain))
    if state.states is not None:
        facts.append(("states", "of recurrent and convolution layers, at this position"))
    if content.aux:
        facts.append(("other inputs", f"{len(content.aux):,}"))
    return facts


def _canonical(stop: int) -> str:
    if not stop:
        return "no rows: a cold run's may have other bits"
    return f"the first {stop:,} rows: a cold run would have the same bits"


def kind_of(part: GroupFacts) -> str:
    """A layer group in words."""
    group = part.group
    window = f", window {group.sliding_window:,}" if group.is_sliding else ""
    count = len(group.layers)
    layers = "layer" if count == 1 else "layers"
    dims = f"{group.num_kv_heads} KV heads x {group.head_dim}"
    return f"{count} {group.kind} {layers}{window}, {dims} {group.dtype}"


def ring_of(part: GroupFacts) -> list[tuple[str, str]]:
    """Where a group's rows lie, as name and text."""
    capacity, length, origin_logical, origin_physical = part.cursor
    facts = [
        ("positions", f"[{origin_logical:,}, {origin_logical + length:,})"),
        ("rows", f"{length:,} of {capacity:,}"),
    ]
    if part.group.is_sliding:
        facts.append(("oldest in row", f"{origin_physical:,}"))
        facts.append(("wraps", f"{part.wraps:,}"))
    return facts


def provenance_of(found: Inspection) -> list[tuple[str, list[tuple[str, str]]]]:
    """Who made the rows: a range of positions, and what bits depend on."""
    runs = []
    first = 0
    for stop, numerics in found.content.state.numerics:
        facts = [
            (name, "none" if value is None else str(value)) for name, value in numerics.items()
        ]
        runs.append((f"positions [{first:,}, {stop:,})", facts))
        first = stop
    return runs
