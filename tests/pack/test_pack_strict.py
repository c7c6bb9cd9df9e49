"""JSON that was written to hurt: refused by type and cause, before it costs anything."""

import pytest

from kvplane.errors import PackCorrupt, PackTooLarge, PackVersion
from kvplane.pack.encoding import parsed
from kvplane.pack.limits import JSON_VALUES
from kvplane.pack.strict import loaded


def test_half_a_surrogate_pair_is_a_corrupt_file_and_no_accident_of_the_encoder():
    with pytest.raises(PackCorrupt, match="UTF-8"):
        parsed(b'{"a":"\\ud800","format":1}', "x")


@pytest.mark.parametrize(
    "text",
    [b'{"a":1.5,"format":2}', b'{"a":1,"a":2,"format":2}', b'{ "format":2}', b'{"format":9}'],
)
def test_a_later_format_is_called_that_whatever_else_is_new_in_it(text):
    with pytest.raises(PackVersion):
        parsed(text, "x")


@pytest.mark.parametrize(
    ("text", "doubt"),
    [
        (b'{"format":1,"x":1.5}', "1.5 is no whole number"),
        (b'{"format":1,"x":-Infinity}', "-Infinity is no whole number"),
        (b'{"format":1,"x":9007199254740992}', "outside 2^53"),
        (b'{"format":1,"x":-9007199254740992}', "outside 2^53"),
        (b'{"format":1,"x":{"a":1,"a":1}}', "stands twice"),
    ],
)
def test_what_format_1_does_not_have_is_named(text, doubt):
    with pytest.raises(PackCorrupt) as refused:
        parsed(text, "x")

    assert doubt in refused.value.what


def test_more_values_than_any_document_has_are_refused_before_they_are_made():
    text = b'{"a":[' + b"[]," * JSON_VALUES + b'0],"format":1}'

    with pytest.raises(PackTooLarge, match="JSON values"):
        parsed(text, "x")


def test_commas_inside_a_string_are_no_values():
    text = b'{"a":"' + b',[{\\"' * JSON_VALUES + b'","format":1}'

    assert 1 == parsed(text, "x")["format"]


def test_a_number_of_a_million_digits_is_never_converted():
    _, doubt = loaded(b"[" + b"9" * 1_000_000 + b"]", "x")

    assert doubt is not None
    assert len(doubt) < 100
