from dataclasses import replace

import pytest

from rocket_core.config import compression_config
from rocket_core.estimates.code_duration import codes_work, profile_work
from rocket_core.estimates.duration import count_operations, layer_parts, total_operations, why_uncounted
from rocket_core.estimates.footprint import ModelShape, Workload, estimate_footprint
from rocket_core.estimates.operations import Operations
from rocket_core.system.machine_speed import MachineSpeed

# A processor that multiplies bfloat16 matrices, as measured by `benchmarks.scale`.
SPEED = MachineSpeed(products=190e9, rough_products=750e9, memory=4.5e9)
# One thread of an AMD EPYC (Zen 5).
ZEN_5 = MachineSpeed(products=120e9, rough_products=480e9, memory=10.4e9)
# The same next to other programs.
BUSY_ZEN_5 = MachineSpeed(products=96e9, rough_products=384e9, memory=7.9e9)
# One thread of an Intel Xeon with tiles, next to another program, at two times.
BUSY_XEON = MachineSpeed(products=107e9, rough_products=430e9, memory=5e9)
XEON = MachineSpeed(products=135e9, rough_products=540e9, memory=5.6e9)
LLAMA_1B = ((2048, 2048), (2048, 512), (2048, 512), (2048, 2048), (2048, 8192), (2048, 8192), (8192, 2048))


def within(estimate, measured, factor):
    return measured / factor <= estimate <= factor * measured


def shape(block, blocks=1, vocabulary=2048):
    parameters = sum(d_in * d_out for d_in, d_out in block)
    hidden = block[0][0]
    whole = blocks * parameters + vocabulary * hidden
    return ModelShape(
        layers=(block,) * blocks,
        block_parameters=(parameters,) * blocks,
        parameters=whole,
        hidden_size=hidden,
        itemsize=2,
        compute_itemsize=2,
        stored_bytes=2 * whole,
    )


def untied(block, blocks, vocabulary):
    """Return the sizes of a bfloat16 model that is computed in float32."""
    table = vocabulary * block[0][0]
    sizes = shape(block, blocks, 2 * vocabulary)
    return replace(sizes, compute_itemsize=4, held_itemsize=2, largest_table=table)


def work(windows=8, **settings):
    config = compression_config(**{"ratio": 0.5, "preset": "fast", **settings})
    return Workload(config=config, windows=windows, sequence_length=1024)


def test_a_measured_block_is_within_the_stated_factor():
    """By stage, as `python -m benchmarks.scale` measured one block of Llama-3.2-1B."""
    counted = count_operations(shape(LLAMA_1B), work())
    for stage, measured in (("differentiating", 9.6), ("calibrating", 72.7), ("factorizing", 50.6)):
        assert measured / 2 < counted[stage].duration(SPEED) < 2 * measured
    assert 134 / 1.5 < total_operations(shape(LLAMA_1B), work()).duration(SPEED) < 134 * 1.5


def test_the_memory_of_a_measured_block_is_within_15_percent():
    assert estimate_footprint(shape(LLAMA_1B), work()).memory_bytes == pytest.approx(2.859e9, rel=0.15)


def test_a_measured_block_of_8b_is_within_the_stated_factors():
    """On a core of an AMD EPYC (Zen 5), whose speed was measured as here; see docs/scaling.md."""
    speed = MachineSpeed(products=104e9, rough_products=415e9, memory=11.4e9)
    attention = ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096))
    sizes = untied((*attention, (4096, 12288), (4096, 12288), (12288, 4096)), 1, 2048)
    assert 820 / 1.5 < total_operations(sizes, work()).duration(speed) < 820 * 1.5
    assert estimate_footprint(sizes, work()).memory_bytes == pytest.approx(5.995e9, rel=0.15)


@pytest.mark.parametrize(
    ("hidden", "keys", "inner", "blocks", "vocabulary", "most"),
    [(4096, 1024, 12288, 36, 151936, 12e9), (8192, 1024, 28672, 80, 128256, 40e9)],
    ids=["Qwen3-8B", "Llama-3.3-70B"],
)
def test_large_models_fit_without_bfloat16_instructions(hidden, keys, inner, blocks, vocabulary, most):
    attention = ((hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden))
    block = (*attention, (hidden, inner), (hidden, inner), (inner, hidden))
    model = untied(block, blocks, vocabulary)
    assert estimate_footprint(model, work(windows=256)).memory_bytes < most
    native = replace(model, compute_itemsize=2)
    assert estimate_footprint(native, work(windows=256)).memory_bytes < most


def test_time_is_in_proportion_to_blocks_and_rises_with_tokens():
    one, four = (count_operations(shape(LLAMA_1B, blocks), work()) for blocks in (1, 4))
    for stage in ("calibrating", "factorizing"):
        assert four[stage].duration(SPEED) == pytest.approx(4 * one[stage].duration(SPEED))
    more = count_operations(shape(LLAMA_1B), work(windows=64))
    assert more["calibrating"].duration(SPEED) > one["calibrating"].duration(SPEED)
    assert more["factorizing"] == one["factorizing"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"preset": "paper"}, "kind sparse"),
        ({"method": "wanda"}, "method wanda"),
        ({"value_bits": 8}, "value_bits"),
        ({"ratio": None, "bits": 4.0, "code_bits": 4}, "code_bits or group_size"),
        ({"ratio": None, "bits": 4.0, "kinds": ("quantized", "sparse")}, "choice of kinds"),
    ],
    ids=str,
)
def test_why_operations_are_not_counted_is_said(settings, said):
    assert count_operations(shape(LLAMA_1B), work(**settings)) is None
    assert total_operations(shape(LLAMA_1B), work(**settings)) is None
    assert said in why_uncounted(work(**settings).config)


def test_a_token_passes_only_the_active_part_of_a_mixture():
    mixture = replace(shape(LLAMA_1B), active_part=1 / 16)
    assert count_operations(mixture, work())["differentiating"].products == 0
    one, other = (count_operations(sizes, work())["differentiating"] for sizes in (shape(LLAMA_1B), mixture))
    assert other.rough_products == pytest.approx(one.rough_products / 16)
    for preset in ("best", "max"):
        one, other = (total_operations(sizes, work(preset=preset)) for sizes in (shape(LLAMA_1B), mixture))
        assert other.rough_products < one.rough_products
        assert other.products < one.products


@pytest.mark.parametrize(
    ("preset", "target", "measured"),
    [
        ("fast", {"ratio": 0.3}, 17.5),
        ("fast", {"bits": 4.0}, 20.4),
        ("best", {"ratio": 0.3}, 28.1),
        ("best", {"bits": 4.0}, 24.6),
    ],
)
def test_a_small_mixture_is_within_the_stated_factor(preset, target, measured):
    """That of `examples/train_tiny_mixture.py`, as `python -m benchmarks.duration` measured it on one core of Zen 5."""
    attention = ((128, 128), (128, 64), (128, 64), (128, 128))
    model = shape((*attention, *((128, 160), (128, 160), (160, 128)) * 8), blocks=4)
    model = replace(model, predicts=True, active_part=1 / 4, heads=4)
    config = compression_config(**{"ratio": None, "preset": preset, **target})
    counted = total_operations(model, Workload(config=config, windows=64, sequence_length=256))
    assert measured / 1.5 < counted.duration(BUSY_ZEN_5) < 1.5 * measured


@pytest.mark.parametrize(("preset", "measured"), [("fast", 131), ("best", 408)])
def test_a_block_of_1b_is_within_the_stated_factor(preset, measured):
    """On one core of an AMD EPYC (Zen 5), as `python -m benchmarks.scale` measured it; see docs/scaling.md."""
    counted = total_operations(shape(LLAMA_1B), work(preset=preset))
    assert measured / 1.5 < counted.duration(ZEN_5) < 1.5 * measured


@pytest.mark.parametrize(
    ("preset", "target", "calibrating", "factorizing"),
    [
        ("fast", {"ratio": 0.3}, 6.5, 1.2),
        ("fast", {"bits": 4.0}, 4.5, 1.2),
        ("best", {"ratio": 0.3}, 10.4, 9.8),
        ("best", {"bits": 4.0}, 6.3, 10.6),
        ("max", {"ratio": 0.3}, 10.2, 71.5),
        ("max", {"bits": 4.0}, 6.3, 80.8),
    ],
)
def test_a_small_model_takes_what_was_measured(preset, target, calibrating, factorizing):
    """The model in `examples` with 64 windows, as `python -m benchmarks.duration` measured it on a Xeon."""
    attention = ((192, 192), (192, 64), (192, 64), (192, 192))
    model = shape((*attention, (192, 512), (192, 512), (512, 192)), blocks=6)
    model = replace(model, predicts=True, heads=6)
    config = compression_config(**{"ratio": None, "preset": preset, **target})
    counted = count_operations(model, Workload(config=config, windows=64, sequence_length=256))
    for stage, measured in (("differentiating", 2.9), ("calibrating", calibrating), ("factorizing", factorizing)):
        assert counted[stage].duration(XEON) == pytest.approx(measured, rel=0.4)


@pytest.mark.parametrize(
    ("speed", "target", "differentiating", "calibrating", "factorizing"),
    [(BUSY_ZEN_5, {"ratio": 0.3}, 57, 166.6, 51.7), (BUSY_XEON, {"bits": 4.0}, 42.6, 127.5, 36.1)],
)
def test_smollm2_takes_what_was_measured(speed, target, differentiating, calibrating, factorizing):
    """SmolLM2-135M with 64 windows, as `python -m benchmarks.duration` measured it on one core."""
    attention = ((576, 576), (576, 192), (576, 192), (576, 576))
    model = shape((*attention, (576, 1536), (576, 1536), (1536, 576)), blocks=30, vocabulary=49152)
    model = replace(model, predicts=True, heads=9, tables=((576, 49152),))
    config = compression_config(**{"ratio": None, "preset": "fast", **target})
    counted = count_operations(model, Workload(config=config, windows=64, sequence_length=256))
    stages = {"differentiating": differentiating, "calibrating": calibrating, "factorizing": factorizing}
    durations = {stage: counted[stage].duration(speed) for stage in stages}
    assert within(sum(durations.values()), sum(stages.values()), 1.5)
    for stage, measured in stages.items():
        assert within(durations[stage], measured, 2)


def test_attention_takes_time_for_each_head_and_token():
    """As in stories260K, whose heads of 8 numbers take most of its time."""
    few, many = (replace(shape(LLAMA_1B), heads=heads) for heads in (0, 32))
    longer = Workload(config=work().config, windows=4, sequence_length=2048)
    for stage in ("differentiating", "calibrating"):
        found, less = (count_operations(model, work())[stage].memory for model in (many, few))
        twice = count_operations(many, longer)[stage].memory
        assert found > less
        assert twice - less == pytest.approx(2 * (found - less))


@pytest.mark.parametrize(
    ("settings", "profiling", "storing"),
    [
        ({}, 0.35, 0.45),
        ({"storage": "memory"}, 0.81, 0.26),
        ({"engine": "vllm"}, 0.12, 0.26),
        ({"engine": "llama.cpp"}, 0.33, 0.57),
        ({"engine": "mlx"}, 0.45, 0.48),
    ],
    ids=str,
)
def test_codes_take_what_was_measured(settings, profiling, storing):
    """A layer of 1024 x 1024, as `python -m benchmarks.code_duration` measured it on one thread of a Xeon."""
    config = work(ratio=None, target_bytes=10**9, **settings).config
    assert why_uncounted(config) is None
    layer = (1024, 1024)
    assert within(profile_work(layer, config).of(layer).duration(BUSY_XEON), profiling, 1.5)
    assert within(codes_work(layer, config).of(layer).duration(BUSY_XEON), storing, 1.5)


def test_tables_take_time_where_a_size_may_quantize_them():
    model = replace(shape(LLAMA_1B), tables=((2048, 32000),))
    for settings, more in (({"target_bytes": 10**9}, True), ({"target_bytes": 10**9, "include": ()}, False)):
        known, alone = (
            total_operations(sizes, work(ratio=None, **settings)).duration(SPEED) for sizes in (model, shape(LLAMA_1B))
        )
        assert (known > alone) == more
    bits = count_operations(model, work(ratio=None, bits=4.0))
    assert bits["factorizing"] == count_operations(shape(LLAMA_1B), work(ratio=None, bits=4.0))["factorizing"]


def test_a_profile_ends_before_factorizing():
    assert "factorizing" not in count_operations(shape(LLAMA_1B), work(ratio=None))


def test_slower_machines_take_longer():
    operations = Operations(products=1e9, rough_products=1e9, memory=1e9, seconds=1.0)
    fast = MachineSpeed(products=1e9, rough_products=2e9, memory=4e9)
    assert operations.duration(fast) == pytest.approx(1 + 1 + 0.5 + 0.25)


@pytest.mark.parametrize("compressing", [False, True])
def test_parts_of_layers_rise_from_nothing_to_all(compressing):
    parts = layer_parts(LLAMA_1B, compressing=compressing)
    assert parts[0] == 0
    assert parts[-1] == 1
    assert parts == sorted(parts)
    assert parts[-1] - parts[-2] > 0.25, "the last layer has four times as many inputs"
    assert layer_parts([], compressing=compressing) == [1.0]
