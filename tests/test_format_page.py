"""docs/format.md against the code: its digests, its limits, its errors."""

import re
from pathlib import Path

import pytest

from kvplane import errors
from kvplane.pack import limits
from kvplane.pack.chain import Aux, block_digest, chain_root
from kvplane.pack.root import CONTENT
from kvplane.storage import base

PAGE = (Path(__file__).parents[1] / "docs" / "format.md").read_text(encoding="utf-8")
ZEROS = "00" * 32


def row(name):
    """The cell behind a table's first cell."""
    found = re.search(rf"^\| {re.escape(name)} \| `?([^|`]*)`? \|$", PAGE, re.MULTILINE)
    return found[1].strip()


def test_the_pages_chains_are_the_codes():
    root = chain_root(ZEROS)
    first = block_digest(root, 0, range(256))
    image = block_digest(root, 0, range(256), [Aux(3, 7, "image", ZEROS)])

    assert row("root") == root.hex()
    assert row("block 0 of ids 0 to 255") == first.hex()
    assert row("its tail, ids 7, 8, 9 (block 1)") == block_digest(first, 1, [7, 8, 9]).hex()
    assert row('block 0 with (3, 7, "image", 32 zero bytes)') == image.hex()


def test_the_pages_root_is_the_codes():
    assert f"    {CONTENT.decode()}\n\n{len(CONTENT)} bytes, these." in PAGE


def test_the_pages_limits_are_the_codes():
    assert row("root.json") == f"{limits.ROOT_NBYTES >> 10} KiB"
    assert row("header of a blob") == f"{limits.HEADER_NBYTES >> 20} MiB"
    assert row("data of a blob of rows") == f"{limits.BLOCK} rows of its group"
    assert row("blob of states") == (
        f"{limits.STATES_NBYTES >> 30} GiB, {limits.TENSOR_AXES} axes a tensor"
    )
    assert row("cut, session") == f"{limits.DOCUMENT_NBYTES >> 20} MiB"
    assert row("node") == f"{limits.NODE_NBYTES >> 10} KiB"
    assert row("lease") == f"{limits.LEASE_NBYTES >> 10} KiB"
    values = limits.JSON_VALUES.bit_length() - 1
    assert row("JSON text") == f"depth {limits.JSON_DEPTH}, 2^{values} values"
    spans = f"2^{limits.SPANS.bit_length() - 1}, of a block {limits.BLOCK}"
    assert row("spans of a document") == spans
    assert row("position, ids") == f"2^{limits.TOKENS.bit_length() - 1}"
    assert row("layers") == f"{limits.LAYERS:,}"
    assert f"{base.LIMIT_PARTS} parts and {base.LIMIT_NAME:,} bytes in all" in PAGE


def test_a_limit_is_the_power_of_two_that_the_page_says():
    for limit in (limits.SPANS, limits.TOKENS, limits.JSON_VALUES, limits.INTEGER_STOP):
        assert limit.bit_count() == 1


@pytest.mark.parametrize("name", re.findall(r"`((?:Pack|Session|Storage)[A-Z]?\w+)(?:\(|`)", PAGE))
def test_the_pages_errors_are_errors_of_packs(name):
    assert issubclass(getattr(errors, name), errors.PackError)
