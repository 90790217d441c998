"""Checks and preparations before long work starts."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rocket_core.calibration.inputs import InputSource, open_source
from rocket_core.calibration.media_text import MediaWithText
from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.checkpoint import Checkpoint, ModelSource, WeightLoader, open_checkpoint
from rocket_core.checkpoint.decoders import check_decodable
from rocket_core.checkpoint.reader import DTYPES
from rocket_core.config import CompressionConfig
from rocket_core.errors import (
    CalibrationError,
    CheckpointFormatError,
    ModelNotFoundError,
    UnsupportedArchitectureError,
    WorkFolderError,
)
from rocket_core.experts import unknown_experts
from rocket_core.exports.gguf_model import plan_gguf
from rocket_core.inspection.checks.coded_weights import check_plain
from rocket_core.inspection.checks.context_fit import fitted
from rocket_core.inspection.checks.engine_limits import check_engine
from rocket_core.inspection.checks.media_lines import check_media, media_lines
from rocket_core.inspection.checks.preconditions import (
    CALIBRATION_WINDOW_LENGTH,
    MAX_CONFIG_BYTES,
    check_calibration,
    check_config,
    parse_config,
)
from rocket_core.inspection.files.dataset_names import is_hub_dataset, local_path_of
from rocket_core.inspection.files.model_advice import advice_on_folder
from rocket_core.inspection.files.model_files import CONFIG_NAME, companions, read_start
from rocket_core.inspection.headers.block_lists import block_of
from rocket_core.inspection.headers.coded_tensors import coded_format
from rocket_core.inspection.headers.layer_names import last_part
from rocket_core.inspection.headers.model_fields import check_sizes, sample_positions
from rocket_core.inspection.headers.weight_summary import storage_dtype
from rocket_core.models.architecture import (
    Architecture,
    build_architecture,
    ignored_layers,
    read_config,
    window_length,
)
from rocket_core.models.pretrained import check_settings
from rocket_core.models.token_tables import TokenTable, token_modules
from rocket_core.pipeline.context import FLOATS, Run
from rocket_core.pipeline.format_groups import check_all_quantized, check_experts
from rocket_core.pipeline.requirements import check_target
from rocket_core.pipeline.state.records import RunIdentity
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.sizes.target import ByLoss
from rocket_core.system.devices import compute_dtype, resolve_devices
from rocket_core.version import __version__


def prepare_run(source: ModelSource, config: CompressionConfig) -> Run:
    """Read the description of the model, and raise an error if the compression cannot work.

    Args:
        source: location of the model's files.
        config: all settings.

    Raises:
        RocketError: the subclass names the problem: device, files, architecture, calibration data, sequence length,
            ignore patterns, or a target that no choice of candidates can reach.
    """
    device, *others = resolve_devices(config.device)
    checkpoint = _open_judged_checkpoint(source)
    model_config = read_config(source.folder)
    check_config(model_config.to_dict(), source.name)
    dtype = _storage_dtype(checkpoint, config)
    computed = compute_dtype(dtype, device)
    architecture = build_architecture(model_config, computed, vision=config.includes_vision)
    named = model_config.to_dict() | {"architectures": [type(architecture.model).__name__]}
    check_engine(named, dtype.itemsize, config.reader, source.name)
    if config.fit is not None:
        # As it was judged, without what transformers adds.
        config = fitted(config, _settings(source), dtype.itemsize, source.name)
    loader = WeightLoader(architecture.model, checkpoint, device)
    _check_all_taken(architecture, loader, source.name)
    # Files that will be copied into the artifacts are checked before long work, and again when they are copied.
    companions(source.folder, source.name)
    check_settings(source.folder)
    layers, skipped, ignored_tables = _select(architecture, loader, config)
    tables, other_tables = _select_tables(architecture, loader, config, ignored_tables)
    local_path_of(config.calibration.dataset)
    length, positions = _lengths(architecture, config.calibration.sequence_length)
    inputs = _open_inputs(source, config, architecture, length)
    medium = inputs.medium if isinstance(inputs, MediaWithText) else None
    towers = {"audio": architecture.audio_tower, "image": architecture.tower}
    run = Run(
        config=config,
        source=source,
        checkpoint=checkpoint,
        architecture=architecture,
        loader=loader,
        inputs=inputs,
        device=device,
        others=tuple(others),
        dtype=dtype,
        compute_dtype=computed,
        sequence_length=length,
        positions=positions,
        layers=layers,
        skipped=skipped | other_tables | _unknown_parameters(architecture),
        tables=tables,
        gguf=plan_gguf(named, source.folder) if "gguf" in config.export else None,
        idle=tuple(tower for reads, tower in towers.items() if tower is not None and reads != medium),
    )
    check_experts(run)
    check_all_quantized(run)
    check_target(run)
    return run


def _open_inputs(
    source: ModelSource, config: CompressionConfig, architecture: Architecture, length: int
) -> InputSource | None:
    """Return the source of the calibration inputs after checking that it suits the model; None if none are read."""
    if not config.calibrates:
        return None
    calibration = config.calibration
    check_calibration(architecture.kind, calibration.dataset, calibration.sequence_length, source.name)
    check_media(architecture.model.config.to_dict(), config, source.name)
    return open_source(source.folder, architecture, length, calibration.dataset)


def run_identity(run: Run) -> RunIdentity:
    """Return the identity of a run's work.

    Calibration files are identified by their content, and windows by their length, whether it was given or is the
    default; quotas, verdict and benchmark are not part of it, nor is an evaluation that decides no size. A device
    counts by its kind and by the dtype that it computes in: whether it was named or detected, and which of several it
    is, does not change the result.
    """
    settings = run.config.model_dump(mode="json", exclude={"statistics_quota_bytes", "evaluate", "accept", "benchmark"})
    settings["device"] = run.device.type
    settings["compute_dtype"] = str(run.compute_dtype).removeprefix("torch.")
    settings["calibration"]["sequence_length"] = run.sequence_length
    reads_media = isinstance(run.inputs, MediaWithText)
    settings["calibration"]["dataset"] = dataset_identity(run.config.calibration.dataset, reads_media=reads_media)
    if isinstance(run.config.target, ByLoss) and run.config.evaluate is not None:
        dataset = dataset_identity(run.config.evaluate.dataset)
        settings["evaluate"] = run.config.evaluate.model_dump(mode="json") | {"dataset": dataset}
    return RunIdentity(
        rocket_version=__version__,
        model=run.source.name,
        revision=run.source.revision(run.checkpoint),
        settings=settings,
    )


def dataset_identity(dataset: str, *, reads_media: bool = False) -> str:
    """Return the name of a data set, or for a local one the hash of its content.

    Args:
        dataset: a name, or a file or folder.
        reads_media: whether the images or recordings that a file names count as well.
    """
    path = local_path_of(dataset)
    if path is None:
        return dataset
    if not reads_media:
        return f"sha256:{_content_hash(path)}"
    files = [path, *(line.file for line in media_lines(path) if line.file is not None)]
    return f"sha256:{hashlib.sha256(''.join(f'{_content_hash(file)};' for file in files).encode()).hexdigest()}"


def calibration_inputs(run: Run, work: WorkFolder, *, token: str | None = None) -> CalibrationInputs:
    """Draw the calibration samples, or return those that a resumed run has drawn.

    Args:
        run: the run.
        work: its work folder.
        token: the Hub's token, for gated data; None uses that of this machine's user, if any.

    Raises:
        CalibrationError: the data has too few samples, or tokens that the model does not have.
        WorkFolderError: the data has changed since the run that is resumed.
    """
    cached = work.inputs()
    settings = run.config.calibration
    if run.inputs is None:
        return CalibrationInputs.of_text(torch.empty(0, run.sequence_length, dtype=torch.int64))
    if cached is not None and is_hub_dataset(settings.dataset):
        return cached
    inputs = run.inputs.draw(settings, token=token)
    if run.config.measures_sensitivities:
        # Those that are differentiated, as neighbours may be of one document.
        inputs = inputs.spread_last(run.config.gradient_windows(len(inputs)))
    _check_token_ids(run, inputs)
    if cached is not None and not cached.equals(inputs):
        raise WorkFolderError(
            f"{work.path} was started with other calibration data of {settings.dataset!r}; give those back, or remove "
            "the folder to start afresh"
        )
    return inputs


def _check_token_ids(run: Run, inputs: CalibrationInputs) -> None:
    highest = max((int(ids.max()) for ids in inputs.token_ids), default=-1)
    if highest < 0:
        return
    vocabulary = run.architecture.vocabulary
    if highest >= vocabulary:
        raise CalibrationError(
            f"the tokenizer of {run.source.name} gives token {highest}, but the model has {vocabulary} embeddings; use "
            "the tokenizer that belongs to the model"
        )


def _lengths(architecture: Architecture, requested: int | None) -> tuple[int, int]:
    """Return the number of tokens per window of text, and of positions of a sample in all lists of blocks."""
    config = architecture.model.config
    if architecture.kind == "images":
        positions = sample_positions(config.to_dict(), "images", CALIBRATION_WINDOW_LENGTH)
        return positions, positions
    length = window_length(config, requested, CALIBRATION_WINDOW_LENGTH)
    return length, sample_positions(config.to_dict(), architecture.kind, length)


def _open_judged_checkpoint(source: ModelSource) -> Checkpoint:
    """Open a checkpoint after checking config.json and headers, as transformers builds whatever sizes it is given."""
    if not (source.folder / CONFIG_NAME).is_file():
        raise ModelNotFoundError(f"{source.folder} has no config.json; {advice_on_folder(source.folder)}")
    config = _settings(source)
    check_config(config, source.name)
    coded = coded_format(config, source.name)
    if coded is not None:
        check_decodable(tuple(scheme.name for scheme in coded.schemes))
    checkpoint = open_checkpoint(source.folder, coded)
    check_plain(checkpoint.weights, source.name)
    check_sizes(config, checkpoint.weights, source.name)
    return checkpoint


def _settings(source: ModelSource) -> dict[str, Any]:
    """Return the content of config.json."""
    return parse_config(read_start(source.folder, CONFIG_NAME, MAX_CONFIG_BYTES + 1), source.name)


def _check_all_taken(architecture: Architecture, loader: WeightLoader, model: str) -> None:
    """Raise an error if a block stores a tensor that the model would leave out, and the result would lack."""
    prefix = f"{architecture.model.base_model_prefix}."
    blocks = {architecture.block_name(index) for index in range(len(architecture.layers))}
    blocks |= {name.removeprefix(prefix) for name in blocks}
    found = [entry for name, entry in loader.unexpected().items() if block_of(name) in blocks]
    if found:
        first, more = found[0], f" and {len(found) - 1} more tensors of its blocks" if found[1:] else ""
        raise CheckpointFormatError(
            f"{model} stores {first.key!r} ({first.dtype}, shape {first.shape}){more}, which "
            f"{type(architecture.model).__name__} does not take, so that the result would be another model; restore "
            "the config.json that belongs to these weights, or start from the original weights if these are coded"
        )


def _content_hash(path: Path) -> str:
    """Return the SHA-256 of a file, or of the files at the top level of a folder with their names."""
    if not path.is_dir():
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    files = sorted(file for file in path.iterdir() if file.is_file())
    return hashlib.sha256("".join(f"{file.name}:{_content_hash(file)};" for file in files).encode()).hexdigest()


def _storage_dtype(checkpoint: Checkpoint, config: CompressionConfig) -> torch.dtype:
    stored = DTYPES[storage_dtype(checkpoint.weights, str(checkpoint.folder))]
    return stored if config.dtype == "auto" else FLOATS[config.dtype]


def _select(
    architecture: Architecture, loader: WeightLoader, config: CompressionConfig
) -> tuple[tuple[tuple[str, ...], ...], dict[str, str], dict[str, str]]:
    """Return the layers to compress by block, those that are skipped, and the ignored modules of token tables."""
    names = [name for block in architecture.layers for name in block]
    matched = ignored_layers(names, config.ignore, token_modules(architecture.model))
    ignored = {name: matched.pop(name) for name in names if name in matched}
    skipped = {name: f"ignored by {pattern!r}" for name, pattern in ignored.items()}
    for name in names:
        if name not in skipped and loader.entry(f"{name}.weight") is None:
            skipped[name] = "stored merged with other tensors in the checkpoint"
        if last_part(name) in config.reader.exact:
            skipped.setdefault(name, f"{config.reader.title} reads it as it is")
    layers = tuple(tuple(name for name in block if name not in skipped) for block in architecture.layers)
    if not any(layers):
        raise UnsupportedArchitectureError(
            f"no layer is left to compress: {len(ignored)} of {len(names)} are ignored and "
            f"{len(names) - len(ignored)} are stored merged with others"
        )
    return layers, skipped, matched


def _unknown_parameters(architecture: Architecture) -> dict[str, str]:
    """Return parameters that hold weights of several layers, such as experts, in a way that is not known."""
    model, names = architecture.model, (architecture.block_name(index) for index in range(len(architecture.layers)))
    found = {
        f"{name}.{key}": shape for name in names for key, shape in unknown_experts(model.get_submodule(name)).items()
    }
    return {name: f"{shape[0]} matrices in one tensor, in a layout that is not known" for name, shape in found.items()}


def _select_tables(
    architecture: Architecture, loader: WeightLoader, config: CompressionConfig, ignored: Mapping[str, str]
) -> tuple[tuple[TokenTable, ...], dict[str, str]]:
    if not config.profiles_tables:
        return (), {}
    skipped = dict(architecture.other_tables)
    tables: list[TokenTable] = []
    for found in architecture.tables:
        both = architecture.model.config.is_encoder_decoder and found.embedding is not None and found.head is not None
        separate = both and all(loader.entry(f"{name}.weight") for name in (found.embedding, found.head))
        tables += found.split() if separate else [found]
    for table in tables:
        stored = [loader.entry(f"{name}.weight") for name in table.modules]
        patterns = [ignored[name] for name in table.modules if name in ignored]
        if patterns:
            skipped[table.name] = f"ignored by {patterns[0]!r}"
        elif stored[0] is None:
            skipped[table.name] = "stored under another name in the checkpoint"
        elif any(stored[1:]):
            skipped[table.name] = "stored twice in the checkpoint"
    return tuple(table for table in tables if table.name not in skipped), skipped
