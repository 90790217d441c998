"""The pass over blocks on disk, compared with the whole model in memory."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.checkpoint import find_model
from rocket_core.errors import CompressionCancelledError
from rocket_core.estimates.footprint import describe_model, sensitivity_disk_bytes
from rocket_core.experts import unfuse
from rocket_core.pipeline.preflight import prepare_run
from rocket_core.pipeline.stages import sensitivity
from rocket_core.pipeline.stages.sensitivity import measure_sensitivities
from rocket_core.pipeline.state.tensor_cache import StateCache
from tests.reference.sensitivity import assert_close, die_at, jacobian_energy, silent_monitor, squared_gradients
from tests.reference.tiny_models import FAMILIES, VOCAB_SIZE, byte_tokenizer
from tests.sampling import sweep

SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA_LIKE = SIZES | {
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
MORE_FAMILIES = {
    # Soft caps on scores and logits, and a window that every second block attends to.
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **LLAMA_LIKE, head_dim=8, sliding_window=8, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
        )
    ),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**LLAMA_LIKE, head_dim=8, sliding_window=8)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**LLAMA_LIKE, num_local_experts=4)),
    # Positions are passed to each block, and the embeddings are followed by a norm.
    "bloom": lambda: BloomForCausalLM(BloomConfig(**SIZES, n_layer=2, n_head=4, initializer_range=0.2)),
}
WINDOWS = 5


def build(family):
    if family in FAMILIES:
        return FAMILIES[family]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MORE_FAMILIES[family]().eval()


def inputs(windows=WINDOWS):
    return CalibrationInputs.of_text(tokens(windows))


def tokens(windows=WINDOWS):
    return torch.randint(3, 259, (windows, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def prepare(tmp_path, settings):
    """Return the run of a model, as the pipeline prepares it."""

    def make(model, **changes):
        folder = tmp_path / "model"
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        run = prepare_run(find_model(str(folder)), settings(**changes))
        if hasattr(model, "set_experts_implementation"):
            # The default implementation of experts does not support float64.
            run.architecture.model.set_experts_implementation("eager")
            model.set_experts_implementation("eager")
        return run

    return make


@pytest.fixture
def small_batches(monkeypatch):
    """Process two windows at once, so that there are three batches."""
    monkeypatch.setattr(sensitivity, "TOKENS_PER_GRADIENT_BATCH", 64)


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma", "phi3", "gpt2", "opt", "gpt_neox", "gemma2", "gemma3", "bloom"]
)
def test_it_equals_one_backward_pass_of_the_whole_model(family, prepare, open_work, small_batches):
    model = build(family).double()
    run = prepare(model)
    assert run.dtype == torch.float64
    found = measure_sensitivities(run, inputs(), open_work(run, inputs()), silent_monitor(run))
    assert_close(found, squared_gradients(model, found, tokens()), within=1e-6)


def test_with_weighted_tokens_labels_are_drawn(prepare, open_work, small_batches):
    model = build("llama").double()
    run = prepare(model, objective="fisher", token_weights="gradient")  # noqa: S106 - no password
    found = measure_sensitivities(run, inputs(), open_work(run, inputs()), silent_monitor(run))
    assert_close(found, squared_gradients(model, found, tokens(), drawn=True), within=1e-6)
    assert all(len(known.token_gradients) == tokens().numel() for known in found.values())


def test_an_expert_counts_as_often_as_it_is_used(prepare, open_work, small_batches):
    model = build("mixtral").double()
    run = prepare(model)
    found = measure_sensitivities(run, inputs(), open_work(run, inputs()), silent_monitor(run))
    unfuse(model)
    expected = squared_gradients(model, found, tokens())
    for block in range(2):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            names = [f"model.layers.{block}.mlp.experts.{expert}.{projection}" for expert in range(4)]
            # As if each had seen one more token.
            average = sum(expected[name] for name in names) / tokens().numel()
            expected |= {name: expected[name] + average for name in names}
    assert len(found) == 2 * (4 + 3 * 4)
    assert_close(found, expected, within=1e-6)


@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 0.003)], ids=str
)
def test_every_dtype_comes_close_to_float64(dtype, within, prepare, open_work, small_batches):
    model = build("llama").to(dtype)
    run = prepare(model)
    found = measure_sensitivities(run, inputs(), open_work(run, inputs()), silent_monitor(run))
    assert_close(found, squared_gradients(model.double(), found, tokens()), within=within)


@pytest.mark.parametrize("factor", [1e-3, 100])
def test_gradients_beyond_half_precision_are_measured(factor, prepare, open_work):
    model = build("llama").half()
    # The range of this dtype is 6e-8 to 65504; gradients must be far below and above it.
    with torch.no_grad():
        model.lm_head.weight *= factor
        model.model.norm.weight *= min(factor, 1.0)
        for block in model.model.layers:
            block.mlp.down_proj.weight /= 64
            block.self_attn.o_proj.weight /= 64
    run = prepare(model)
    found = measure_sensitivities(run, inputs(), open_work(run, inputs()), silent_monitor(run))
    assert_close(found, squared_gradients(model.double(), found, tokens()), within=0.01)


def test_loaded_weights_require_no_gradients(prepare):
    run = prepare(build("gpt2"))
    run.loader.load(["transformer.h.1", "transformer.wte"])
    block = run.architecture.blocks[1]
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in block.parameters())


def test_only_the_first_windows_are_used(prepare, open_work):
    model = build("llama")
    run = prepare(model)
    found = measure_sensitivities(run, inputs(), open_work(run, inputs()), silent_monitor(run), windows=2)
    assert_close(found, squared_gradients(model.double(), found, tokens()[:2]), within=1e-5)


def test_ignored_layers_are_passed_through_unmeasured(prepare, open_work):
    model = build("llama")
    run = prepare(model, ignore=("model.layers.0.*", "*.q_proj"))
    work = open_work(run, inputs())
    found = measure_sensitivities(run, inputs(), work, silent_monitor(run))
    assert len(found) == 6
    assert_close(found, squared_gradients(model.double(), found, tokens()), within=1e-5)


def encoder_run(folder, settings):
    """Return a model without a head and its run, on three layers of each block."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = BertConfig(**LLAMA_LIKE)
        model = BertModel(config).eval().double()
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    run = prepare_run(
        find_model(str(folder)), settings(precision="float64", ignore=("*.key", "*.value", "*.intermediate.dense"))
    )
    return model, run


def test_without_a_loss_it_measures_the_final_hidden_states(tmp_path, settings, open_work, small_batches):
    model, run = encoder_run(tmp_path / "bert", settings)
    window = tokens(1)[:, :8]
    # Each repetition draws different signs.
    found = measure_sensitivities(
        run,
        CalibrationInputs.of_text(window.expand(1000, 8)),
        open_work(run, inputs()),
        silent_monitor(run),
        windows=1000,
    )
    assert len(found) == 6
    assert_close(found, jacobian_energy(model, found, window), within=0.05)


@pytest.fixture
def four_layers(prepare, open_work, small_batches):
    """Return a run of two blocks with two layers each, and its files after an uninterrupted measurement."""
    run = prepare(build("llama"), ignore=("*.k_proj", "*.v_proj", "*.mlp.*"))
    work = open_work(run, inputs(), "whole")
    measure_sensitivities(run, inputs(), work, silent_monitor(run))
    work.release()
    return run, read_all(work)


def read_all(work):
    assert not (work.path / "sensitivity-states").exists()
    return {file.name: file.read_bytes() for file in (work.path / "sensitivities").iterdir()}


def test_cancelled_anywhere_it_resumes_to_the_same_bytes(four_layers, open_work):
    run, expected = four_layers
    assert len(expected) == 4 + 1, "four layers, and how likely the text is"
    # It checks at each of two blocks and the head, forward and backward, for each of three batches.
    for stop in range(1, 15, 2):
        work = open_work(run, inputs(), str(stop))
        asked = itertools.count()
        with pytest.raises(CompressionCancelledError):
            measure_sensitivities(run, inputs(), work, silent_monitor(run, should_cancel=lambda: next(asked) == stop))  # noqa: B023
        measure_sensitivities(run, inputs(), work, silent_monitor(run))
        assert read_all(work) == expected


@pytest.mark.parametrize("step", sweep([3], soak=[1]))
def test_killed_at_any_file_it_resumes_to_the_same_bytes(four_layers, open_work, monkeypatch, step):
    run, expected = four_layers
    for number in itertools.count(step=step):
        for late in (False, True):
            work = open_work(run, inputs(), f"{number}{late}")
            with monkeypatch.context() as patch:
                operations = die_at(patch, number, late=late)
                try:
                    measure_sensitivities(run, inputs(), work, silent_monitor(run))
                except KeyboardInterrupt:
                    pass
                else:
                    assert (
                        number >= next(operations) >= 3 + 3 + 4 + 5
                    )  # Hidden states, gradients and layers, and their removal.
                    return
            known = [file.stem for file in (work.path / "sensitivities").glob("*.safetensors")]
            cache = StateCache(work.path / "sensitivity-states")
            forward, reached = cache.indices("hidden"), cache.indices("gradients")
            with monkeypatch.context() as patch:
                loads = record_loads(patch, run.loader)
                measure_sensitivities(run, inputs(), work, silent_monitor(run))
            assert read_all(work) == expected
            blocks = [names[0] for names in loads if names[0].startswith("model.layers.")]
            if len(known) == 4:
                assert not loads
            elif reached:
                assert blocks == [f"model.layers.{index}" for index in reversed(range(reached[0]))]
            else:
                assert not known
                assert len(blocks) <= 2 + 2 - max(len(forward) - 1, 0)


def record_loads(patch, loader):
    loads, load = [], loader.load

    def recording(names, **options):
        loads.append(names)
        load(names, **options)

    patch.setattr(loader, "load", recording)
    return loads


def test_a_complete_measurement_is_only_read(four_layers, open_work, monkeypatch):
    run, expected = four_layers
    work = open_work(run, inputs(), "whole")
    monkeypatch.setattr(run.loader, "load", lambda names: pytest.fail(f"loads {names}"))
    found = measure_sensitivities(run, inputs(), work, silent_monitor(run))
    assert sorted([*(f"{name}.safetensors" for name in found), "text.json"]) == sorted(expected)


@torch.no_grad()
def test_the_original_predictions_of_the_text_are_kept(prepare, open_work, small_batches):
    model = build("llama").double()
    run = prepare(model)
    work = open_work(run, inputs())
    measure_sensitivities(run, inputs(), work, silent_monitor(run))
    logits = model(tokens()).logits[:, :-1]
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    found = work.text()
    assert found.tokens == tokens()[:, 1:].numel()
    assert found.negative_log_likelihood == pytest.approx(float(model(tokens(), labels=tokens()).loss))
    assert found.entropy == pytest.approx(float(entropies.mean()))


def test_the_disk_it_takes_is_predicted(prepare, open_work, tmp_path):
    run = prepare(build("llama"))
    work, taken = open_work(run, inputs()), []
    watcher = silent_monitor(run, on_progress=lambda _progress: taken.append(work.stored_bytes))
    with watcher.stage("calibrating"):
        measure_sensitivities(run, inputs(40), work, watcher, windows=40)
    model = describe_model(json.loads((tmp_path / "model" / "config.json").read_text()), run.checkpoint.weights)
    expected = sensitivity_disk_bytes(model, windows=40, sequence_length=32)
    assert 0.7 * expected <= max(taken) - taken[0] <= 1.05 * expected


def test_every_block_is_reported(prepare, open_work, small_batches):
    run = prepare(build("llama"))
    told = []
    watcher = silent_monitor(run, on_progress=told.append)
    with watcher.stage("calibrating"):
        measure_sensitivities(run, inputs(), open_work(run, inputs()), watcher)
    begin, end = told[0].fraction, told[0].fraction + 0.72
    fractions = [progress.fraction for progress in told]
    assert fractions == sorted(fractions)
    assert (begin + end) / 2 < fractions[-1] < end
    layers = [progress.layer for progress in told if progress.layer]
    assert list(dict.fromkeys(layers)) == ["model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.q_proj"]


MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from rocket_core.checkpoint import find_model
from rocket_core.config import compression_config
from rocket_core.system.process_memory import return_freed_memory
from rocket_core.pipeline.preflight import prepare_run, run_identity
from tests.reference.sensitivity import silent_monitor
from rocket_core.pipeline.stages.sensitivity import measure_sensitivities
from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.pipeline.state.work_folder import WorkFolder

def anonymous():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("RssAnon"))

peak = 0
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
config = compression_config(ratio=0.3, calibration={"dataset": sys.argv[1], "samples": 8, "sequence_length": 32})
tokens = CalibrationInputs.of_text(torch.randint(3, 259, (2, 32)))
for number, model in enumerate(sys.argv[2:]):
    run = prepare_run(find_model(model), config)
    work = WorkFolder(Path(model) / f"work{number}")
    work.claim(run_identity(run), tokens)
    return_freed_memory()
    before = peak = anonymous()
    measure_sensitivities(run, tokens, work, silent_monitor(run))
    print(peak - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_hardly_grows_with_the_number_of_blocks(tmp_path, text):
    folders = [tmp_path / str(blocks) for blocks in (4, 12)]
    for folder in folders:
        config = LLAMA_LIKE | {"hidden_size": 128, "intermediate_size": 8192, "num_hidden_layers": int(folder.name)}
        LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    size = (folders[-1] / "model.safetensors").stat().st_size
    assert size >= 150e6
    # Every tensor is returned to the system as soon as it is freed, so that peaks are of tensors in use: what an
    # allocator retains differs by half from run to run, and is tested with `return_grown_memory`.
    returned = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, str(text), *map(str, [folders[0], *folders])],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | returned | {"PYTHONPATH": str(Path.cwd())},
    )
    # The first line is from a process that has not computed anything yet.
    few, many = map(int, measured.stdout.splitlines()[1:])
    assert many <= 1.15 * few, (few, many)
    assert many < size / 2, (many, size)
