import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_core.errors import CheckpointFormatError
from rocket_core.layers import LayerEntry, format_version, quantization_config, read_entries

OWNER = {"rank": 4, "nnz": 9}
FOLLOWER = {"rank": 4, "nnz": 7, "dictionary": "q"}
SPARSE = {"nnz": 5}

COUNTS = st.integers(1, 2**40)


@given(ranks=st.lists(COUNTS, max_size=4), sparse=st.integers(0, 3), follows=st.booleans(), nnz=COUNTS)
def test_reading_reverses_writing(ranks, sparse, follows, nnz):
    entries = {f"layer {index}": LayerEntry(rank=rank, nnz=nnz) for index, rank in enumerate(ranks)}
    entries |= {f"sparse {index}": LayerEntry(nnz=nnz) for index in range(sparse)}
    if ranks and follows:
        entries["follower"] = LayerEntry(rank=ranks[0], nnz=nnz, dictionary="layer 0")
    written = json.loads(json.dumps(quantization_config(entries)))
    assert read_entries(written["layers"], written["format_version"]) == entries
    assert written["quant_method"] == "rocket"


@pytest.mark.parametrize(
    ("layers", "version"),
    [({}, 1), ({"q": OWNER}, 1), ({"q": OWNER, "k": FOLLOWER}, 2), ({"o": SPARSE}, 2)],
)
def test_the_earliest_sufficient_version_is_written(layers, version):
    entries = read_entries(layers, 2)
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
    ],
)
def test_an_invalid_entry_is_refused_by_its_name(layer, entry, reason):
    layers = {"q": OWNER, "v": FOLLOWER, "s": SPARSE}
    with pytest.raises(CheckpointFormatError, match=f"layer '{layer}'.*{reason}.*fetch it again"):
        read_entries(layers | {layer: entry}, 2)


@pytest.mark.parametrize(("layer", "entry"), [("k", FOLLOWER), ("s", SPARSE)])
def test_format_1_has_only_layers_with_separate_dictionaries(layer, entry):
    with pytest.raises(CheckpointFormatError, match=f"layer '{layer}'.*format 1.*fetch it again"):
        read_entries({"q": OWNER, layer: entry}, 1)


@pytest.mark.parametrize("layers", [None, [], [OWNER], 3, "q"])
def test_an_invalid_table_is_refused(layers):
    with pytest.raises(CheckpointFormatError, match="must be a table"):
        read_entries(layers, 2)
