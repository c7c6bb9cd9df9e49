"""The page of `kvplane inspect` in a real Chromium: it renders, and its controls work by keyboard.

Not part of `make test`: `make browser` brings the driver. Screenshots go to docs/images when
KVPLANE_SCREENSHOTS names a folder.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch

from kvplane import KVStore, ModelGeometry
from kvplane.inspect import found, inspected, page
from kvplane.pack import Fingerprint, PrefixCache, save_session

pytestmark = pytest.mark.browser

KINDS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2
GEOMETRY = ModelGeometry.uniform(
    KINDS, sliding_window=128, num_kv_heads=2, head_dim=16, dtype="float16"
)
SIZES = {"desk": (1100, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A session whose rings have turned, and which shares its beginning with another."""
    folder = tmp_path_factory.mktemp("inspect")
    prefixes = PrefixCache(folder / "root", Fingerprint.of(GEOMETRY, weights="a test"))
    session = KVStore(GEOMETRY, max_context=4096).open(tokens=[])
    generator = torch.Generator().manual_seed(15)
    for stop, name in ((1024, "earlier"), (2100, "notes")):
        while session.position < stop:
            count = min(256, stop - session.position)
            with session.step(list(range(session.position, session.position + count))) as step:
                for layer in range(len(KINDS)):
                    rows = torch.randn(2, count, 2, 16, generator=generator) * (1 + layer / 4)
                    step.write(layer, *(rows * (1 + session.position / 2100)).half())
        save_session(prefixes.storage, name, session, prefixes.fingerprint)
    text = page(inspected(prefixes.storage, found(prefixes.storage, "notes")))
    file = folder / "notes.html"
    file.write_text(text.replace(str(folder), "packs"), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        named = os.environ.get("KVPLANE_CHROMIUM") or shutil.which("chromium")
        running = playwright.chromium.launch(executable_path=named, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def opened(browser, path):
    """The page in a window of a size and a colour scheme; nothing may be complained of."""
    said, contexts = [], []

    def open_page(size="desk", scheme="light", **options):
        width, height = SIZES[size]
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, **options
        )
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: said.append(request.url))
        tab.goto(path.as_uri())
        return tab

    yield open_page
    for context in contexts:
        context.close()

    assert [path.as_uri()] * len(contexts) == said


def colours(tab):
    """How many colours the heat map has."""
    script = """() => { const c = document.getElementById("heat");
      const image = c.getContext("2d").getImageData(0, 0, c.width, c.height);
      return new Set(new Uint32Array(image.data.buffer)).size; }"""
    return tab.evaluate(script)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_renders_and_fits(opened, size, scheme):
    tab = opened(size, scheme)
    folder = os.environ.get("KVPLANE_SCREENSHOTS")
    if folder is not None:
        tab.screenshot(path=Path(folder) / f"inspect-{size}-{scheme}.png", full_page=True)

    assert SIZES[size][0] == tab.evaluate("document.documentElement.scrollWidth")
    assert 2 == tab.locator(".card").count()
    assert tab.get_by_text("16 wraps").is_visible()
    assert colours(tab) > 20


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_told_from_its_ground(opened, scheme):
    tab = opened("desk", scheme)
    script = """() => [...document.querySelectorAll(
        "h1, h2, h3, p, b, dt, dd, td, th, summary, label, legend, button, footer")]
      .filter((e) => e.textContent.trim()).map((e) => {
        const ground = (g) => getComputedStyle(g).backgroundColor;
        let g = e;
        while (ground(g) === "rgba(0, 0, 0, 0)") g = g.parentElement;
        return [getComputedStyle(e).color, ground(g)]; })"""
    pairs = {tuple(pair) for pair in tab.evaluate(script)}

    assert 2 < len(pairs)
    # what the accessibility guidelines ask of text of this size
    assert all(contrast(*pair) >= 4.5 for pair in pairs), sorted(
        (contrast(*pair), pair) for pair in pairs
    )


def contrast(one, other):
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour):
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").rstrip(")").split(",")]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_control_is_reached_by_the_tab_key(opened):
    tab = opened()
    reached = []
    for _ in range(9):
        tab.keyboard.press("Tab")
        reached.append(
            tab.evaluate(
                "document.activeElement.id || document.activeElement.name || "
                "document.activeElement.tagName.toLowerCase()"
            )
        )

    assert ["theme", "what", "scale", "heat", "summary"] == list(
        dict.fromkeys(name for name in reached if name != "body")
    )[:5]


def test_arrow_keys_walk_over_the_heat_map(opened):
    tab = opened()
    readout = tab.locator("#readout")
    tab.locator("#heat").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "Shift+ArrowRight", "ArrowRight"):
        tab.keyboard.press(key)

    # nine positions a column
    assert readout.inner_text().startswith("layer 3 (full_attention), positions 99 to 107: mean")
    tab.keyboard.press("End")
    assert "positions 2,097 to 2,099" in readout.inner_text()
    tab.keyboard.press("Home")
    tab.keyboard.press("ArrowUp")
    assert "layer 2 (sliding_attention), positions 0 to 8: no row is held" == readout.inner_text()


def test_keys_and_values_are_switched_by_keyboard(opened):
    tab = opened()
    tab.locator("#heat").focus()
    tab.keyboard.press("End")
    before = tab.locator("#readout").inner_text()
    tab.locator("input[name=what][value=key]").focus()
    tab.keyboard.press("ArrowRight")

    assert "of a key" in before
    assert "of a value" in tab.locator("#readout").inner_text()


def test_colours_by_all_layers_are_others(opened):
    tab = opened()
    script = "document.getElementById('heat').toDataURL()"
    before = tab.evaluate(script)
    tab.locator("input[name=scale][value=layer]").focus()
    tab.keyboard.press("ArrowRight")

    assert before != tab.evaluate(script)


def test_the_theme_is_turned_by_its_button_and_follows_the_system(opened):
    tab = opened()
    ground = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(ground)
    tab.emulate_media(color_scheme="dark")
    dark = tab.evaluate(ground)
    tab.locator("#theme").focus()
    tab.keyboard.press("Enter")

    assert light == tab.evaluate(ground) != dark
    assert "Dark" == tab.locator("#theme").inner_text()


def test_a_cell_is_read_by_pointing_at_it(opened):
    tab = opened("phone")
    tab.locator("#heat").click(position={"x": 1, "y": 1})

    assert tab.locator("#readout").inner_text().startswith("layer 0")


def test_without_scripts_all_but_the_heat_map_is_there(opened):
    tab = opened(java_script_enabled=False)

    assert tab.get_by_text("16 wraps").is_visible()
    assert tab.get_by_text("session earlier").is_visible()
    assert tab.get_by_text("The heat map needs scripts").is_visible()
