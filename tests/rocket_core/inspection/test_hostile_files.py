"""Hostile headers, config.json and ignore patterns: refused as errors of this library, with bounded work.

Work is measured as processor time of the thread, which a busy machine does not change much; the limits are generous and
a tenth of what the same files took before they were limited.
"""

import contextlib
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_core.config import CompressionConfig, compression_config
from rocket_core.errors import InvalidConfigError, RocketError, UnmatchedIgnoreError
from rocket_core.estimates.footprint import Workload, describe_model, estimate_footprint
from rocket_core.estimates.healing import vocabulary
from rocket_core.inspection.checks.feasibility import any_selection_allows, check_feasible
from rocket_core.inspection.checks.model_reach import reach_of_headers
from rocket_core.inspection.checks.preconditions import (
    MAX_CONFIG_BYTES,
    check_config,
    check_ignore,
    check_weights,
    parse_config,
    window_length,
)
from rocket_core.inspection.files.safetensors_headers import header_length, parse_header
from rocket_core.inspection.headers.model_fields import (
    check_fields,
    check_sizes,
    input_bytes,
    input_kind,
    positions,
    sample_positions,
)
from rocket_core.inspection.headers.weight_summary import summarize, summarize_files
from rocket_core.sizes.target import ByRatio
from tests.reference.hostile_files import (
    CONFIGS,
    HEADERS,
    LARGE_CONFIGS,
    LLAMA,
    ignore_patterns,
    long_names,
    many_shapes,
)
from tests.reference.safetensors_files import ITEM_BITS, header_of, llama_tensors, safetensors_bytes

GOOD_CONFIG = json.dumps(LLAMA).encode()
GOOD_FILE = safetensors_bytes(llama_tensors())
SECONDS = 4.0
# Limit for cases with hundreds of thousands of elements, where run-time type checks take most of the time.
CHECKED_SECONDS = 40.0
MANY = {"too_many_tensors", "test_the_maximum_number_of_shapes_is_judged_in_time", *LARGE_CONFIGS}
WORK = {"windows": 4, "sequence_length": 32}


def weights_of(raw):
    length = header_length(raw[:8], len(raw), "f")
    return summarize_files([parse_header(raw[8 : 8 + length], len(raw), "f")])


def judge(raw_config, raw_file, *, ratio=0.3, ignore=()):
    """Run all checks that the service makes on a model without loading it."""
    config = parse_config(raw_config, "m")
    check_config(config, "m")
    weights = weights_of(raw_file)
    check_feasible(config, weights, CompressionConfig(ratio=ratio, ignore=ignore), "m")
    model = describe_model(config, weights, ignore=ignore)
    assert reach_of_headers(config, weights, CompressionConfig(ratio=0.3, ignore=ignore)).ratio < 1
    length = window_length(positions(config), None)
    work = {"windows": 4, "sequence_length": sample_positions(config, input_kind(config), length)}
    estimate_footprint(model, Workload(config=CompressionConfig(ratio=0.3), **work))
    return vocabulary(config, model), input_bytes(config, input_kind(config))


def is_refused(judged, *arguments, most=400):
    """Return whether an error of this library is raised, with a short message."""
    try:
        judged(*arguments)
    except RocketError as error:
        message = str(error)
    else:
        return False
    assert len(message) < most
    return True


@pytest.fixture
def bounded(request):
    case = request.node.callspec.id if hasattr(request.node, "callspec") else request.node.name
    started = time.thread_time()
    yield
    assert time.thread_time() - started < (CHECKED_SECONDS if case in MANY else SECONDS)


def test_the_unmodified_model_is_accepted():
    assert judge(GOOD_CONFIG, GOOD_FILE, ignore=("*.q_proj",)) == (320, 0)


@pytest.mark.parametrize("name", HEADERS)
def test_a_hostile_header_is_refused(name, bounded):
    raw = HEADERS[name]()
    assert is_refused(judge, GOOD_CONFIG, raw)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hostile_config_is_refused(name, bounded):
    raw = CONFIGS[name]()
    assert is_refused(judge, raw, GOOD_FILE)


@pytest.mark.parametrize("name", LARGE_CONFIGS)
def test_a_config_of_maximum_size_is_judged_in_time(name, bounded):
    raw = LARGE_CONFIGS[name]()
    assert 10**5 < len(raw) <= MAX_CONFIG_BYTES
    is_refused(judge, raw, GOOD_FILE)


@pytest.mark.parametrize("name", ignore_patterns())
def test_ignore_patterns_have_limits(name, bounded):
    patterns = ignore_patterns()[name]
    file = long_names(5000)
    if name in {"long", "many"}:
        with pytest.raises(InvalidConfigError, match=r"ignore.*at most 256"):
            compression_config(ratio=0.3, ignore=patterns)
        return
    compression_config(ratio=0.3, ignore=patterns)
    with pytest.raises(InvalidConfigError, match="too long for a model of 5000 layers"):
        judge(b'{"model_type": "llama"}', file, ratio=0.1, ignore=patterns)


def test_a_hint_for_a_long_pattern_is_not_quadratic(bounded):
    # What a caller of the library may pass beyond the limits of the settings.
    with pytest.raises(UnmatchedIgnoreError, match="layers are called like"):
        check_ignore(LLAMA, weights_of(GOOD_FILE), ("q" * 100_000,), "m")


def test_the_maximum_number_of_shapes_is_judged_in_time(bounded):
    file = many_shapes(1000)
    with pytest.raises(RocketError, match="out of reach"):
        judge(GOOD_CONFIG, file, ratio=0.95)
    judge(GOOD_CONFIG, file)


FIELDS = [
    *LLAMA,
    "auto_map",
    "context_length",
    "d_model",
    "dim",
    "image_size",
    "is_encoder_decoder",
    "max_source_positions",
    "max_target_positions",
    "n_embd",
    "n_positions",
    "num_channels",
    "num_mel_bins",
    "pad_token_id",
    "patch_size",
    "quantization_config",
    "text_config",
]
SIZES = st.integers(-2, 70) | st.sampled_from([2**31, 2**62, 2**63, 2**70, 10**39, -(2**63)])
SCALARS = (
    st.none()
    | st.booleans()
    | SIZES
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["llama", "roberta", "gpt2", "t5"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
    max_leaves=6,
)
CONFIG = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=4), VALUES, max_size=8)
NAMES = st.sampled_from(
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "encoder.block.0.layer.0.wi.weight",
        "decoder.block.0.layer.0.wi.weight",
        "model.layers.0.mlp.experts.3.up_proj.weight",
        "0.w.weight",
        "h.٣.x.weight",
        "..0..weight",
        ".weight",
        "",
    ]
)
SHAPE = st.lists(st.sampled_from([0, 1, 2, 3, 8, 64]), max_size=3).map(tuple)
TENSORS = st.dictionaries(NAMES, st.tuples(st.sampled_from([*ITEM_BITS]), SHAPE), max_size=6)


@settings(deadline=None, max_examples=150)
@given(CONFIG, TENSORS, st.lists(st.text("*?[]!a.q_proj", max_size=12), max_size=3))
def test_any_config_and_header_is_judged_or_refused(fields, tensors, ignore):
    config = json.loads(json.dumps(fields))
    header, data = header_of(tensors)
    weights = None
    with contextlib.suppress(RocketError):
        weights = summarize(parse_header(header, 8 + len(header) + data, "f"))
    started = time.thread_time()
    for judged in (
        lambda: parse_config(json.dumps(fields).encode(), "m"),
        lambda: check_config(config, "m"),
        lambda: check_fields(config, "m"),
        lambda: positions(config),
        lambda: window_length(positions(config), 64),
        lambda: [sample_positions(config, kind, 64) for kind in ("text", "images", "audio", input_kind(config))],
        lambda: [input_bytes(config, kind) for kind in ("text", "images", "audio")],
        lambda: (
            weights
            and (
                check_weights(weights, "m"),
                any_selection_allows(weights, ByRatio(ratio=0.5), CompressionConfig(ratio=0.5), 4),
            )
        ),
        lambda: weights and check_sizes(config, weights, "m"),
        lambda: weights and check_ignore(config, weights, ignore, "m"),
        lambda: weights and described(config, weights, ignore),
    ):
        is_refused(judged, most=800)
    assert time.thread_time() - started < SECONDS


def described(config, weights, ignore):
    model = describe_model(config, weights, ignore=ignore)
    estimate_footprint(model, Workload(config=CompressionConfig(ratio=0.3), **WORK))
    vocabulary(config, model)
    assert reach_of_headers(config, weights, CompressionConfig(ratio=0.3, ignore=ignore)).ratio < 1


@settings(deadline=None, max_examples=150)
@given(
    st.dictionaries(
        NAMES | st.just("__metadata__"),
        VALUES | st.fixed_dictionaries({"dtype": VALUES, "shape": VALUES, "data_offsets": VALUES}),
    )
)
def test_any_json_object_is_parsed_or_refused(fields):
    raw = json.dumps(fields).encode()
    try:
        tensors = parse_header(raw, 8 + len(raw), "f")
    except RocketError:
        return
    # Without data there is room for nothing.
    assert summarize(tensors).stored_bytes == 0


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_file_with_altered_bytes_is_read_or_refused(data):
    raw = bytearray(GOOD_FILE[:1500])
    for position in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=3)):
        raw[position] = data.draw(st.integers(0, 255))
    is_refused(weights_of, bytes(raw) + GOOD_FILE[1500:], most=800)
