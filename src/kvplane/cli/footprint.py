"""`kvplane footprint`: bytes by layer kind, and what the stock caches would take."""

import json
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from kvplane.cli.geometries import geometry_of
from kvplane.cli.output import both, console, print_table
from kvplane.footprint import Footprint
from kvplane.footprint import footprint as plan
from kvplane.geometry import FULL, SLIDING, ModelGeometry
from kvplane.payload import cut_every, cut_positions, handoff, published, saved_session
from kvplane.stock import Stock, dynamic_cache, static_cache

# the contexts of a table, as far as the one asked for
CONTEXTS = (2048, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)


def footprint(
    model: str,
    /,
    *,
    context: int = 131072,
    sessions: int = 1,
    slack: int = 0,
    step: int = 1,
    speculative: bool = False,
    page_nbytes: int = 1,
    row_floor: int = 1,
    forks: int = 0,
    dtype: str | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    plot: Path | None = None,
) -> None:
    """Print the bytes that a model's sessions take, by layer kind.

    Example: kvplane footprint muse-glimmer-30b --context 32768 --sessions 4

    Args:
        model: A preset, the path of a config.json or its folder, or a Hugging Face id.
        context: Tokens of each session.
        sessions: How many sessions there are.
        slack: Rows of a ring beyond its window: rewinds up to that deep lose nothing.
        step: Tokens of a step.
        speculative: Whether a step may accept fewer tokens than it was given.
        page_nbytes: What the memory gives at a time; 1 counts rows.
        row_floor: Fewest rows of a plane that the kernel in use takes.
        forks: Also print what a session and this many forks of it hold together.
        dtype: Of the rows: float16, bfloat16 or float32; the model's own unless given.
        as_json: Print JSON instead of tables.
        plot: Draw bytes over context into this file.
    """
    geometry = geometry_of(model, dtype=dtype)

    def planned(tokens: int, *, room: int = 0) -> Footprint:
        return plan(
            geometry,
            context=tokens,
            max_context=tokens + room,
            sessions=sessions,
            slack=slack,
            step=step,
            speculative=speculative,
            page_nbytes=page_nbytes,
            row_floor=row_floor,
            gather=True,
        )

    contexts = [*(size for size in CONTEXTS if size < context), context]
    plans = [planned(tokens) for tokens in contexts]
    held = [_forks(now, planned(now.context, room=1), forks) for now in plans]
    facts = _facts(model, plans, held, slack=slack)
    if plot is not None:
        from kvplane.cli.plots import draw_footprint  # noqa: PLC0415 - an extra

        draw_footprint(plot, model, plans)
    if as_json:
        print(json.dumps(facts))  # noqa: T201
        return
    out = console()
    out.print(_summary(model, geometry))
    out.print()
    _print_plans(out, plans)
    _print_stock(out, plans)
    _print_rest(out, plans[-1], slack=slack, forks=forks, held=held[-1])


def _summary(model: str, geometry: ModelGeometry) -> str:
    lines = [f"{model}: {len(geometry.layers)} layers, {geometry.dtype} rows"]
    for group in geometry.groups:
        window = f", window {group.sliding_window:,}" if group.is_sliding else ""
        nbytes = group.row_nbytes * len(group.layers)
        lines.append(
            f"  {len(group.layers)} x {group.kind}{window}, {group.num_kv_heads} KV heads x "
            f"{group.head_dim}: {nbytes:,} B a token"
        )
    return "\n".join(lines)


def _print_plans(out: Console, plans: list[Footprint]) -> None:
    count = plans[0].sessions
    header = ["context", SLIDING, FULL, "one session", "full share"]
    if count > 1:
        header.insert(4, f"{count} sessions")
    rows = []
    for now in plans:
        full = now.kind(FULL).reserved
        cells = [f"{now.context:,}", both(now.kind(SLIDING).reserved, out), both(full, out)]
        cells.append(both(now.session.reserved, out))
        if count > 1:
            cells.append(both(now.total.reserved, out))
        cells.append(f"{_share(full, now.session.reserved):.1f} %")
        rows.append(cells)
    print_table(out, "kvplane", header, rows)


def _print_stock(out: Console, plans: list[Footprint]) -> None:
    header = [
        "context",
        "DynamicCache holds",
        "after a prompt",
        "peak",
        "StaticCache holds",
        "peak",
    ]
    rows = []
    for now in plans:
        dynamic, static = _stock(now)
        sizes = (dynamic.held, dynamic.after_prompt, dynamic.peak, static.held, static.peak)
        rows.append([f"{now.context:,}", *(both(size, out) for size in sizes)])
    print_table(out, "transformers' own caches, one session", header, rows)


def _print_rest(
    out: Console, now: Footprint, *, slack: int, forks: int, held: dict[str, int]
) -> None:
    rows = [[name, both(nbytes, out)] for name, nbytes in _scratch(now).items()]
    rows += [[name, both(nbytes, out)] for name, nbytes in _leaves(now, slack=slack).items()]
    if forks:
        what = f"session and {forks} forks"
        rows.append([f"{what}, mapped memory", both(held["mapped"], out)])
        rows.append([f"{what}, a token later", both(held["mapped_a_token_later"], out)])
        rows.append([f"{what}, heap memory", both(held["heap"], out)])
    print_table(out, f"one session at {now.context:,}", ["", "bytes"], rows)


def _share(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0


def _stock(now: Footprint) -> tuple[Stock, Stock]:
    return (
        dynamic_cache(now.geometry, context=now.context),
        static_cache(now.geometry, context=now.context, max_context=now.max_context),
    )


def _scratch(now: Footprint) -> dict[str, int]:
    return {
        "reserved": now.session.reserved,
        "rows held": now.session.rows_held,
        "pages held": now.session.pages_held,
        "journal of a step": now.session.journal,
        "window and step in one tensor": now.session.gather,
        "a chunk that waits": now.session.waiting,
    }


def _leaves(now: Footprint, *, slack: int) -> dict[str, int]:
    num_cuts = len(cut_positions(now.geometry, now.context))
    facts = {
        "saved session, rows": saved_session(now.geometry, now.context, slack=slack).total,
        f"published with {num_cuts} cuts, rows": published(now.geometry, now.context).total,
    }
    if now.context > 1:
        # the receiver runs the last token itself
        facts["handoff of such a prompt"] = handoff(now.geometry, now.context - 1).total
    return facts


def _forks(now: Footprint, roomier: Footprint, forks: int) -> dict[str, int]:
    """Bytes that a session and its forks hold, and in mapped memory when each took a token."""
    return {
        "mapped": now.forks_held(forks, shares_pages=True),
        "mapped_a_token_later": roomier.forks_held(forks, shares_pages=True, written=1),
        "heap": now.forks_held(forks, shares_pages=False),
    }


def _facts(
    model: str, plans: list[Footprint], held: list[dict[str, int]], *, slack: int
) -> dict[str, Any]:
    contexts = []
    for now, forks in zip(plans, held, strict=True):
        dynamic, static = _stock(now)
        contexts.append(
            {
                **now.to_dict(),
                "kinds": {kind: now.kind(kind).to_dict() for kind in (SLIDING, FULL)},
                "stock": {
                    "dynamic": {"held": dynamic.held, "after_prompt": dynamic.after_prompt}
                    | {"peak": dynamic.peak},
                    "static": {"held": static.held, "peak": static.peak},
                },
                "saved_session": saved_session(now.geometry, now.context, slack=slack).total,
                "published": published(now.geometry, now.context).total,
                "forks": forks,
            }
        )
    return {
        "model": model,
        "dtype": plans[0].geometry.dtype,
        "layers": len(plans[0].geometry.layers),
        "cut_every": cut_every(plans[0].geometry),
        "contexts": contexts,
    }
