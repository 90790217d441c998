import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_core.errors import CheckpointFormatError
from rocket_core.layers import LayerEntry, format_version, quantization_config, read_entries
from rocket_core.sizes.code_format import CodeFormat

OWNER = {"rank": 4, "nnz": 9}
FOLLOWER = {"rank": 4, "nnz": 7, "dictionary": "q"}
SPARSE = {"nnz": 5}
CODES = {"bits": 4, "group_size": 16, "scale_bits": 6, "scale_exponent": -21}

COUNTS = st.integers(1, 2**40)


FORMATS = st.builds(
    CodeFormat, bits=st.sampled_from([2, 3, 4, 5, 6, 7, 8]), group_size=COUNTS, scale_bits=st.sampled_from([6, 8, 16])
)


@given(
    ranks=st.lists(COUNTS, max_size=4),
    sparse=st.integers(0, 3),
    follows=st.booleans(),
    nnz=COUNTS,
    formats=st.lists(FORMATS, max_size=2),
    exponent=st.integers(-100, 100),
)
def test_reading_reverses_writing(ranks, sparse, follows, nnz, formats, exponent):
    entries = {f"layer {index}": LayerEntry(rank=rank, nnz=nnz) for index, rank in enumerate(ranks)}
    entries |= {f"sparse {index}": LayerEntry(nnz=nnz) for index in range(sparse)}
    if ranks and follows:
        entries["follower"] = LayerEntry(rank=ranks[0], nnz=nnz, dictionary="layer 0")
    quantized = {f"quantized {index}": LayerEntry.of_codes(each, exponent) for index, each in enumerate(formats)}
    assert [entry.code_format for entry in quantized.values()] == formats
    entries |= quantized
    written = json.loads(json.dumps(quantization_config(entries)))
    assert read_entries(written["layers"], written["format_version"]) == entries
    assert written["quant_method"] == "rocket"


@pytest.mark.parametrize(
    ("layers", "version"),
    [({}, 1), ({"q": OWNER}, 1), ({"q": OWNER, "k": FOLLOWER}, 2), ({"o": SPARSE}, 2), ({"q": OWNER, "o": CODES}, 3)],
)
def test_the_earliest_sufficient_version_is_written(layers, version):
    entries = read_entries(layers, 3)
    assert format_version(entries) == version
    assert quantization_config(entries) == {"quant_method": "rocket", "format_version": version, "layers": layers}


@pytest.mark.parametrize(
    ("layer", "entry", "reason"),
    [
        ("o", {}, "nnz"),
        ("o", {"nnz": 0}, "nnz"),
        ("o", {"nnz": True}, "nnz"),
        ("o", {"nnz": 2.0}, "nnz"),
        ("o", {"nnz": "2"}, "nnz"),
        ("o", {"nnz": 2, "rank": 0}, "rank"),
        ("o", {"nnz": 2, "rank": -1}, "rank"),
        ("o", {"nnz": 2, "rank": 4, "dictionary": 7}, "dictionary"),
        ("o", {"nnz": 2, "blocksize": 64}, "blocksize"),
        ("o", 4, "its entry"),
        ("k", FOLLOWER | {"dictionary": "p"}, "'p', which is not in the table"),
        ("k", FOLLOWER | {"dictionary": "k"}, "'k', which has none"),
        ("k", FOLLOWER | {"dictionary": "v"}, "'v', which has none"),
        ("k", FOLLOWER | {"dictionary": "s"}, "'s', which has none"),
        ("k", FOLLOWER | {"rank": 3}, "rank 3, and the dictionary of 'q' that it takes 4"),
        ("k", {"nnz": 7, "dictionary": "q"}, "a dictionary and no rank"),
        ("k", FOLLOWER | {"dictionary": "c"}, "'c', which has none"),
        ("o", CODES | {"nnz": 5, "rank": 2}, "a dictionary_exponent is for codes of"),
        ("o", CODES | {"rank": 5}, "neither coefficients nor codes are complete"),
        ("o", CODES | {"dictionary": "q"}, "neither coefficients nor codes are complete"),
        ("o", {"rank": 4}, "neither coefficients nor codes are complete"),
        *(("o", {key: CODES[key] for key in CODES if key != gone}, "neither") for gone in CODES),
        ("o", SPARSE | {"group_size": 16}, "it has coefficients and parts of codes"),
        ("o", CODES | {"bits": 9}, r"bits, one of .*\['bits'\]"),
        ("o", CODES | {"bits": 4.0}, r"\['bits'\]"),
        ("o", CODES | {"bits": "4"}, r"\['bits'\]"),
        ("o", CODES | {"scale_bits": 7}, r"\['scale_bits'\]"),
        ("o", CODES | {"group_size": 0}, r"\['group_size'\]"),
        ("o", CODES | {"group_size": True}, r"\['group_size'\]"),
        ("o", CODES | {"scale_exponent": 1.0}, r"\['scale_exponent'\]"),
        ("o", CODES | {"scale_exponent": 601}, "not within 600 of zero"),
        ("o", CODES | {"scale_bits": 8, "scale_exponent": -1201}, "not within 1200 of zero"),
        ("o", CODES | {"scale_bits": 16, "scale_exponent": 10**400}, "not within 100 of zero"),
        ("o", CODES | {"zero_point": 3}, r"\['zero_point'\]"),
    ],
)
def test_an_invalid_entry_is_refused_by_its_name(layer, entry, reason):
    layers = {"q": OWNER, "v": FOLLOWER, "s": SPARSE, "c": CODES}
    with pytest.raises(CheckpointFormatError, match=f"layer '{layer}'.*{reason}.*fetch it again"):
        read_entries(layers | {layer: entry}, 3)


@pytest.mark.parametrize(("layer", "entry"), [("k", FOLLOWER), ("s", SPARSE)])
def test_format_1_has_only_layers_with_separate_dictionaries(layer, entry):
    with pytest.raises(CheckpointFormatError, match=f"layer '{layer}'.*format 1.*fetch it again"):
        read_entries({"q": OWNER, layer: entry}, 1)


@pytest.mark.parametrize("version", [1, 2])
def test_quantized_layers_need_format_3(version):
    with pytest.raises(CheckpointFormatError, match=f"layer 'o'.*format {version}.*fetch it again"):
        read_entries({"q": OWNER, "o": CODES}, version)


@pytest.mark.parametrize("layers", [None, [], [OWNER], 3, "q"])
def test_an_invalid_table_is_refused(layers):
    with pytest.raises(CheckpointFormatError, match="must be a table"):
        read_entries(layers, 2)
