import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.errors import ArgumentError, PackCorrupt, PackTooLarge, PackVersion
from kvplane.pack.chain import Aux, Chain, block_digest, chain_root, packed_ids
from kvplane.pack.encoding import canonical, parsed, sealed, self_digest, unsealed
from kvplane.pack.limits import INTEGER_STOP, JSON_DEPTH

ZEROS = "0" * 64
GOLDEN_ROOT = "8febd7523269a7d40b17aae60107193069554eb61aa5f990746e9ba688cf4a5b"
GOLDEN_BLOCK = "9fda82622dc6651fb6296e3e68e1cd8c837caf1d1a693bd3b95ae4aadabed17f"
GOLDEN_TAIL = "af1f12bbd570a24d488ae2459b00727a0af0f7b2b01f7f2638e9588f8227fb89"
GOLDEN_AUX = "36fd6c95f7ebed521e27cca271aacc3e860be50d34eeb1d0413a6891d9fd1585"

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=5), values, max_size=4))
def test_a_document_survives_its_own_text_whatever_the_order_of_its_keys(fields):
    fields["format"] = 1
    backwards = dict(reversed(list(fields.items())))

    assert fields == parsed(canonical(backwards), "x")
    assert canonical(fields) == canonical(backwards)


@pytest.mark.parametrize(
    "text",
    [
        b'{"format": 1}',
        b'{"format":1}\n',
        b'{"z":1,"format":1}',
        b'{"format":1,"format":1}',
        b'{"a":{"b":1,"b":1},"format":1}',
        b'{"a":1.0,"format":1}',
        b'{"a":1e3,"format":1}',
        b'{"a":NaN,"format":1}',
        b'{"a":9007199254740992,"format":1}',
        b'{"a":' + b"9" * 5000 + b',"format":1}',
        b'{"a":-0,"format":1}',
        b'{"a":"\\u0041","format":1}',
        b'{"a":"\\/","format":1}',
        b'{"a":"\xff","format":1}',
        b"[1]",
        b"{",
        b"",
        b'\xef\xbb\xbf{"format":1}',
    ],
)
def test_a_text_that_is_not_the_canonical_one_is_refused(text):
    with pytest.raises((PackCorrupt, PackVersion)):
        parsed(text, "x")


@pytest.mark.parametrize("number", [0, 2, "1", None, True, 1000])
def test_another_format_is_refused_before_anything_else_is_looked_at(number):
    text = canonical({"format": number, "unknown": [[]]})

    with pytest.raises(PackVersion) as refused:
        parsed(text, "x")

    assert (1, number) == (refused.value.expected, refused.value.got)


def test_deep_nesting_is_refused_before_the_parser_sees_it():
    deep = b'{"a":' + b"[" * (JSON_DEPTH + 1) + b"]" * (JSON_DEPTH + 1) + b',"format":1}'

    with pytest.raises(PackTooLarge, match="depth"):
        parsed(deep, "x")
    with pytest.raises(PackTooLarge, match="depth"):
        parsed(b"[" * 1_000_000, "x")


def test_brackets_inside_a_string_are_no_nesting():
    fields = {"a": '[[[[{{{{"\\' * 20, "format": 1}

    assert fields == parsed(canonical(fields), "x")


def test_the_largest_whole_number_is_kept():
    fields = {"a": INTEGER_STOP - 1, "format": 1}

    assert fields == parsed(canonical(fields), "x")


def test_a_seal_covers_every_field_and_the_kind_of_document():
    data = sealed("cut", {"a": 1, "format": 1})

    assert {"a": 1, "format": 1} == {
        name: value for name, value in unsealed("cut", data, "x").items() if name != "self"
    }
    assert self_digest("cut", {"a": 1}) != self_digest("session", {"a": 1})
    with pytest.raises(PackCorrupt, match="self"):
        unsealed("session", data, "x")
    with pytest.raises(PackCorrupt, match="self"):
        unsealed("cut", data.replace(b'"a":1', b'"a":2'), "x")


def test_the_golden_digests_of_the_format_come_out():
    chain = Chain(ZEROS, [*range(256), 7, 8, 9])
    aux = [Aux(3, 7, "image", ZEROS)]
    with_aux = block_digest(chain_root(ZEROS), 0, list(range(256)), aux)

    assert GOLDEN_ROOT == chain.at(0)
    assert GOLDEN_BLOCK == chain.at(1)
    assert GOLDEN_TAIL[:16] == chain.tail(259)
    assert GOLDEN_AUX == with_aux.hex()
    assert "-" == chain.tail(256)


def test_b63_digests_are_equal_in_processes_with_other_hash_seeds_and_locales():
    code = (
        "from kvplane.pack.chain import Chain; from kvplane.pack.encoding import sealed; "
        f"c = Chain('{ZEROS}', list(range(300))); "
        "print(c.at(1), c.tail(300), sealed('cut', {'b': 1, 'a': chr(233), 'format': 1}))"
    )
    said = set()
    for seed, locale in (("0", "C"), ("1", "C.UTF-8"), ("12345", "tr_TR.UTF-8")):
        env = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": locale, "PYTHONUTF8": "0"}
        env["PYTHONIOENCODING"] = "utf-8"
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, check=True, capture_output=True
        )
        said.add(done.stdout)

    assert 1 == len(said)


def test_b64_what_is_hashed_has_boundaries():
    root = chain_root(ZEROS)
    digests = {
        block_digest(root, 0, [1, 2, 3]),
        block_digest(root, 0, [1, 2]),
        block_digest(root, 1, [1, 2, 3]),
        block_digest(root, 0, [1, 2, 3], [Aux(0, 3, "image", ZEROS)]),
        block_digest(root, 0, [1, 2, 3], [Aux(0, 2, "image", ZEROS)]),
        block_digest(root, 0, [1, 2, 3], [Aux(0, 3, "imag", "e" + ZEROS[1:])]),
        block_digest(chain_root(ZEROS, salt=b"a"), 0, [1, 2, 3]),
    }

    assert 7 == len(digests)


def test_b62_another_tenant_has_another_chain():
    assert Chain(ZEROS, [1], salt=b"").at(0) != Chain(ZEROS, [1], salt=b"tenant").at(0)


@pytest.mark.parametrize("token", [-1, 2**32, 2**70, 1.5, "a"])
def test_ids_outside_32_bits_are_refused(token):
    with pytest.raises(ArgumentError):
        packed_ids([0, token])
