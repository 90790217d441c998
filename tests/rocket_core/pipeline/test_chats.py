"""Compressions that are calibrated on chats."""

import json

import pytest
import torch
from transformers import AutoTokenizer

import rocket_core
from rocket_core.calibration.inputs import open_source
from rocket_core.config import CalibrationConfig, compression_config
from rocket_core.models.architecture import build_architecture, read_config
from rocket_core.report.html import render_report
from rocket_core.report.schema import CompressionReport
from tests.reference.tiny_models import save_tiny_model

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


@pytest.fixture
def model(tmp_path):
    folder = save_tiny_model("llama", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def chats(folder, *more):
    rows = [{"messages": [{"role": "user", "content": "Hi " * length}]} for length in range(2, 12)]
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (*rows, *more)))
    return str(file)


def compressed(model, output, **calibration) -> CompressionReport:
    settings = {"samples": 8, "sequence_length": 24} | calibration
    return rocket_core.compress(model, output, compression_config(ratio=0.3, calibration=settings))


def test_each_chat_may_be_a_window_without_padding(tmp_path, model):
    report = compressed(model, tmp_path / "out", dataset=chats(tmp_path, {"other": 1}), pack=False, skip_bad_rows=True)
    architecture = build_architecture(read_config(model), torch.float32)
    drawn = open_source(model, architecture, 24).draw(report_settings(report, tmp_path))
    lengths = [ids.shape[1] for ids in drawn.token_ids]
    assert len(set(lengths)) > 1
    # Nothing is padded: all positions of which statistics are computed are tokens of chats.
    assert report.calibration.tokens == sum(lengths)
    assert report.calibration.text is not None
    assert report.calibration.text.tokens == sum(lengths) - len(lengths)
    assert report.calibration.skipped_rows == 1
    assert report.calibration.advice is None


def report_settings(report, folder) -> CalibrationConfig:
    return report.settings.calibration.model_copy(update={"dataset": str(folder / report.calibration.dataset)})


def test_a_chat_model_on_plain_text_is_told_what_to_do(tmp_path, model):
    (tmp_path / "plain.txt").write_text("some words " * 300)
    report = compressed(model, tmp_path / "out", dataset=str(tmp_path / "plain.txt"))
    assert report.calibration.advice is not None
    assert "chat template" in report.calibration.advice
    assert "and was calibrated on plain text; calibrate on chats" in render_report(report)
