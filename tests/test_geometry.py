import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.errors import GeometryError
from kvplane.geometry import (
    FULL,
    MAX_LAYERS,
    MAX_SIZE,
    SLIDING,
    LayerGeometry,
    ModelGeometry,
    Rotary,
)

SHAPE = {"num_kv_heads": 2, "head_dim": 16, "value_head_dim": 16}


def sliding(**facts):
    return LayerGeometry(**({"kind": SLIDING, "sliding_window": 8} | SHAPE | facts))


def full(**facts):
    return LayerGeometry(**({"kind": FULL} | SHAPE | facts))


def model(*layers, dtype="bfloat16"):
    return ModelGeometry(layers=layers, dtype=dtype)


# acceptance A1 to A3, on the preset


def test_muse_glimmer_has_39_sliding_and_13_full_layers_and_no_layer_52():
    geometry = ModelGeometry.preset("muse-glimmer-30b")
    ring, plane = geometry.groups

    assert (39, 13) == (len(ring.layers), len(plane.layers))
    assert tuple(range(3, 52, 4)) == plane.layers
    with pytest.raises(GeometryError, match=r"layer = 52: must be within \[0, 52\)"):
        geometry.group_of(52)
    with pytest.raises(GeometryError):
        geometry.group_of(-1)


def test_muse_glimmer_takes_53248_bytes_a_token_and_13312_above_the_window():
    ring, plane = ModelGeometry.preset("muse-glimmer-30b").groups

    assert 256 == plane.num_kv_heads * plane.head_dim
    assert 512 == plane.num_kv_heads * plane.head_dim * plane.itemsize
    assert (1024, 1024) == (ring.row_nbytes, plane.row_nbytes)
    assert 53_248 == sum(group.row_nbytes * len(group.layers) for group in (ring, plane))
    assert 13_312 == plane.row_nbytes * len(plane.layers)


# groups


def test_a_group_is_named_by_everything_that_matters():
    geometry = model(
        sliding(sliding_window=2048, head_dim=192, value_head_dim=128), full(), dtype="float16"
    )

    assert ["s2048.2x192x128.f16", "f0.2x16x16.f16"] == [group.id for group in geometry.groups]
    assert [True, False] == [group.is_sliding for group in geometry.groups]


@pytest.mark.parametrize(
    ("dtype", "short", "itemsize"),
    [("float32", "f32", 4), ("bfloat16", "bf16", 2), ("float16", "f16", 2)],
)
def test_a_row_is_counted_in_the_dtype_it_is_kept_in(dtype, short, itemsize):
    (group,) = model(full(num_kv_heads=3, value_head_dim=8), dtype=dtype).groups

    assert f"f0.3x16x8.{short}" == group.id
    assert itemsize == group.itemsize
    assert 3 * (16 + 8) * itemsize == group.row_nbytes


def test_layers_that_differ_in_anything_that_matters_are_in_groups_of_their_own():
    different = [
        full(),
        sliding(),
        sliding(sliding_window=9),
        full(num_kv_heads=1),
        full(head_dim=8),
        full(value_head_dim=8),
    ]
    geometry = model(*different, *different)

    assert [(i, i + 6) for i in range(6)] == [group.layers for group in geometry.groups]


def test_rotation_makes_no_group():
    rotary = Rotary(base=10_000.0, dim=16)

    (group,) = model(full(), full(rotary=rotary)).groups

    assert (0, 1) == group.layers


def test_every_layer_that_owns_rows_is_in_the_group_that_group_of_names():
    geometry = model(sliding(), full(), sliding(), full(head_dim=8, value_head_dim=8))

    assert [0, 1, 0, 2] == [geometry.groups.index(geometry.group_of(layer)) for layer in range(4)]


@pytest.mark.parametrize("layer", [True, 1.0, "1", None, [1]], ids=repr)
def test_only_an_int_names_a_layer(layer):
    geometry = model(sliding(), full())

    with pytest.raises(GeometryError, match="layer = "):
        geometry.group_of(layer)


def test_a_layer_that_shares_rows_owns_none_and_reads_its_owners():
    geometry = model(sliding(), full(), sliding(shares_kv_with=0), full(shares_kv_with=1))

    assert [(0,), (1,)] == [group.layers for group in geometry.groups]
    assert [0, 1, 0, 1] == [geometry.owner(layer) for layer in range(4)]
    assert geometry.group_of(0) is geometry.group_of(2)
    assert [True, True, False, False] == [layer.owns_rows for layer in geometry.layers]


def test_a_layer_without_attention_is_in_no_group_and_has_no_owner():
    geometry = model(LayerGeometry(kind="conv"), full())

    assert [(1,)] == [group.layers for group in geometry.groups]
    assert not geometry.layers[0].has_attention
    assert not geometry.layers[0].owns_rows
    with pytest.raises(GeometryError, match="layer = 0: is a conv layer"):
        geometry.owner(0)


def test_a_model_of_one_shape_is_made_in_one_call():
    geometry = ModelGeometry.uniform(
        [SLIDING, FULL], sliding_window=8, num_kv_heads=2, head_dim=16, dtype="float32"
    )

    assert model(sliding(), full(), dtype="float32") == geometry


def test_a_model_of_one_shape_may_have_other_values_than_keys():
    geometry = ModelGeometry.uniform(
        [FULL], sliding_window=None, num_kv_heads=2, head_dim=16, value_head_dim=8
    )

    assert model(full(value_head_dim=8)) == geometry


# refusals


@pytest.mark.parametrize("name", ["num_kv_heads", "head_dim", "value_head_dim"])
@pytest.mark.parametrize("size", [0, -1, MAX_SIZE, 2.0, True, "2", None])
def test_an_impossible_size_is_refused_by_its_name(name, size):
    with pytest.raises(GeometryError) as refused:
        model(full(), full(**{name: size}))

    assert f"layers[1].{name}" == refused.value.field
    assert "must be a whole number within [1, 1048576)" == refused.value.reason
    assert size is refused.value.value


def test_the_largest_size_is_one_below_the_limit():
    assert MAX_SIZE - 1 == model(full(head_dim=MAX_SIZE - 1)).groups[0].head_dim


@pytest.mark.parametrize("window", [0, -1, MAX_SIZE, 8.0])
def test_an_impossible_window_is_refused(window):
    with pytest.raises(GeometryError) as refused:
        model(sliding(sliding_window=window))

    assert "layers[0].sliding_window" == refused.value.field


def test_a_window_goes_with_sliding_layers_and_no_others():
    for layer in (sliding(sliding_window=None), full(sliding_window=8)):
        with pytest.raises(GeometryError, match="does not go with kind") as refused:
            model(layer)

        assert "layers[0].sliding_window" == refused.value.field
        assert layer.sliding_window is refused.value.value


@pytest.mark.parametrize("facts", [{"num_kv_heads": 2}, {"sliding_window": 8}])
def test_a_layer_without_attention_has_neither_heads_nor_a_window(facts):
    with pytest.raises(GeometryError, match="a mamba layer holds no rows") as refused:
        model(LayerGeometry(kind="mamba", **facts))

    assert "layers[0].num_kv_heads" == refused.value.field
    assert facts.get("num_kv_heads", 0) == refused.value.value


@pytest.mark.parametrize("kind", ["sliding", "dummy", "", None, ["conv"], "chunked_attention"])
def test_a_kind_of_layer_that_is_not_known_is_refused(kind):
    with pytest.raises(GeometryError, match="must be one of sliding_attention, full_at") as refused:
        model(full(), LayerGeometry(kind=kind))

    assert ("layers[1].kind", kind) == (refused.value.field, refused.value.value)


@pytest.mark.parametrize("owner", [-1, 1, 2, 3, 4, "0", [0]])
def test_rows_are_shared_with_an_earlier_layer_that_owns_some(owner):
    layers = [full(), LayerGeometry(kind="conv"), full(shares_kv_with=0)]
    with pytest.raises(GeometryError) as refused:
        model(*layers, full(shares_kv_with=owner))

    assert ("layers[3].shares_kv_with", owner) == (refused.value.field, refused.value.value)
    assert "must be an earlier layer that owns rows" == refused.value.reason


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_kv_heads", 1), ("head_dim", 8), ("value_head_dim", 8), ("sliding_window", 9)],
)
def test_rows_are_shared_with_a_layer_of_the_same_shape(name, value):
    with pytest.raises(GeometryError) as refused:
        model(sliding(), sliding(**{"shares_kv_with": 0, name: value}))

    assert ("layers[1].shares_kv_with", 0) == (refused.value.field, refused.value.value)
    assert f"differs from layer 1 in {name}" == refused.value.reason


def test_rows_are_shared_with_a_layer_of_the_same_kind():
    with pytest.raises(GeometryError, match="differs from layer 1 in kind"):
        model(full(), sliding(shares_kv_with=0))


@pytest.mark.parametrize("dtype", ["int8", "f16", "torch.float16", None])
def test_rows_are_kept_in_a_dtype_that_is_known(dtype):
    with pytest.raises(GeometryError) as refused:
        model(full(), dtype=dtype)

    assert ("dtype", dtype) == (refused.value.field, refused.value.value)
    assert "must be one of ['bfloat16', 'float16', 'float32']" == refused.value.reason


def test_a_model_has_layers_and_not_too_many():
    assert MAX_LAYERS == len(model(*[full()] * MAX_LAYERS).layers)
    for count in (0, MAX_LAYERS + 1):
        with pytest.raises(GeometryError, match=rf"layers = {count}: must be within \[1, 1024\]"):
            model(*[full()] * count)


def test_layers_may_be_given_as_any_sequence():
    assert model(full()) == ModelGeometry(layers=[full()])
    assert hash(model(full())) == hash(ModelGeometry(layers=[full()]))


# rotation


NUMBER = "must be a finite number above 0"
EVEN = "must be an even number within [2, 1048576)"
PAIRS = "must be one of ('half', 'interleaved')"


@pytest.mark.parametrize(
    ("facts", "field", "reason"),
    [
        ({"base": 0.0}, "rotary.base", NUMBER),
        ({"base": -1.0}, "rotary.base", NUMBER),
        ({"base": float("nan")}, "rotary.base", NUMBER),
        ({"base": float("inf")}, "rotary.base", NUMBER),
        ({"base": True}, "rotary.base", NUMBER),
        ({"base": "1"}, "rotary.base", NUMBER),
        ({"dim": 2.0}, "rotary.dim", EVEN),
        ({"dim": 0}, "rotary.dim", EVEN),
        ({"dim": -2}, "rotary.dim", EVEN),
        ({"dim": 3}, "rotary.dim", EVEN),
        ({"dim": MAX_SIZE}, "rotary.dim", EVEN),
        ({"convention": "full"}, "rotary.convention", PAIRS),
    ],
)
def test_an_impossible_rotation_is_refused_by_its_field(facts, field, reason):
    with pytest.raises(GeometryError) as refused:
        Rotary(**({"base": 10_000.0, "dim": 16} | facts))

    assert (field, reason) == (refused.value.field, refused.value.reason)
    assert next(iter(facts.values())) is refused.value.value


@pytest.mark.parametrize("dim", [2, 4, 6, MAX_SIZE - 2])
def test_any_even_number_of_elements_may_be_rotated(dim):
    assert dim == Rotary(base=1, dim=dim).dim


def test_a_rotation_is_of_halves_and_unscaled_unless_said():
    rotary = Rotary(base=0.5, dim=2)

    assert ("half", None) == (rotary.convention, rotary.scaling)


# as JSON


@st.composite
def geometries(draw):
    layers = []
    for layer in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from([SLIDING, FULL, "conv"]))
        if kind == "conv":
            layers.append(LayerGeometry(kind=kind))
            continue
        like = [i for i in range(layer) if layers[i].kind == kind and layers[i].owns_rows]
        if like and draw(st.booleans()):
            owner = draw(st.sampled_from(like))
            layers.append(dataclasses.replace(layers[owner], shares_kv_with=owner))
            continue
        rotary = None
        if draw(st.booleans()):
            scaling = draw(
                st.none()
                | st.just((("factor", 8.0), ("rope_type", "yarn")))
                | st.just((("long_factor", (1.0, 2.5)), ("rope_type", "longrope")))
            )
            convention = draw(st.sampled_from(["half", "interleaved"]))
            rotary = Rotary(base=1e4, dim=8, convention=convention, scaling=scaling)
        layers.append(
            LayerGeometry(
                kind=kind,
                sliding_window=draw(st.integers(1, 9)) if kind == SLIDING else None,
                num_kv_heads=draw(st.integers(1, 3)),
                head_dim=draw(st.sampled_from([8, 16])),
                value_head_dim=draw(st.sampled_from([8, 16])),
                rotary=rotary,
            )
        )
    dtype = draw(st.sampled_from(["float16", "bfloat16", "float32"]))
    return ModelGeometry(layers=tuple(layers), dtype=dtype)


@given(geometries())
def test_a_geometry_survives_a_trip_through_json(geometry):
    again = ModelGeometry.from_dict(json.loads(json.dumps(geometry.to_dict())))

    assert geometry == again
    assert hash(geometry) == hash(again)
    assert geometry.to_dict() == again.to_dict()


@given(geometries())
def test_every_row_of_a_model_is_in_exactly_one_group(geometry):
    grouped = sorted(layer for group in geometry.groups for layer in group.layers)

    assert [i for i, layer in enumerate(geometry.layers) if layer.owns_rows] == grouped
    for layer, its in enumerate(geometry.layers):
        if its.has_attention:
            group = geometry.group_of(layer)

            assert (its.kind, its.sliding_window) == (group.kind, group.sliding_window)
            assert (its.num_kv_heads, its.head_dim, its.value_head_dim) == (
                group.num_kv_heads,
                group.head_dim,
                group.value_head_dim,
            )


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"dtype": "float16"},
        {"layers": []},
        {"dtype": "float16", "layers": None},
        {"dtype": "float16", "layers": [{}]},
        {"dtype": "float16", "layers": [{"kind": "conv", "rotary": None, "window": 1}]},
        {"dtype": "float16", "layers": [{"kind": "conv", "rotary": {"base": 1.0}}]},
        {"dtype": "float16", "layers": [{"kind": "conv", "rotary": {"scaling": 3}}]},
    ],
)
def test_facts_that_are_no_geometry_are_refused(broken):
    with pytest.raises(GeometryError):
        ModelGeometry.from_dict(broken)


def test_facts_that_lack_something_say_what():
    with pytest.raises(GeometryError) as refused:
        ModelGeometry.from_dict({"dtype": "float16"})

    assert ("geometry", {"dtype": "float16"}) == (refused.value.field, refused.value.value)
    assert "lacks 'layers'" == refused.value.reason


def test_the_scaling_of_a_rotation_is_written_as_an_object_of_lists():
    scaling = (("long_factor", (1.0, 2.5)), ("rope_type", "longrope"))
    geometry = model(full(rotary=Rotary(base=1e4, dim=8, scaling=scaling)))

    written = geometry.to_dict()["layers"][0]["rotary"]["scaling"]

    assert {"long_factor": [1.0, 2.5], "rope_type": "longrope"} == written
