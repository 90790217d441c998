"""Models and data as people have them, from the request to the downloaded result of a job."""

import json
import os
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rocket_core.hf  # noqa: F401 - registers the format of artifacts
from rocket_core.report.schema import CompressionReport
from tests.reference.few_bit_models import save_few_bits
from tests.worker.threads import ThreadedAttempt as Attempt

CALIBRATION = {"samples": 6, "sequence_length": 32}


@pytest.fixture
def download(client, settings, database, claim, tmp_path):
    """Submit a job, run it, and return the folder of its downloaded result."""

    def download(**request):
        answer = client.post("/jobs", json={"model_id": "local/tiny", "calibration": CALIBRATION} | request)
        assert answer.status_code == 202, answer.text
        job = answer.json()["id"]
        Attempt(settings, database, claim(job), threading.Event()).run(os.getppid())
        found = client.get(f"/jobs/{job}").json()
        assert (found["status"], found["error"]) == ("succeeded", None)
        for file in client.get(f"/jobs/{job}/artifacts").json()["data"]:
            target = tmp_path / "result" / file["name"]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(client.get(f"/jobs/{job}/artifacts/{file['name']}").content)
        return tmp_path / "result"

    return download


@pytest.mark.parametrize(("scheme", "size"), [("deepseek_v3", 400_000), ("mxfp4", 70_000)])
def test_an_original_in_few_bits_becomes_a_model_of_a_size(scheme, size, download, settings):
    save_few_bits(scheme, settings.models_folder / "tiny")
    result = download(target_bytes=size) / "rocket"
    assert 0.9 * size < (result / "model.safetensors").stat().st_size <= size
    model = AutoModelForCausalLM.from_pretrained(result)
    assert model.generate(torch.arange(8)[None] + 100, max_new_tokens=4, do_sample=False).shape == (1, 12)


def test_a_job_is_calibrated_on_chats(download, settings, model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(model)
    settings.datasets_folder.mkdir(parents=True)
    chats = [[{"role": "user", "content": "Hi " * length}] for length in range(2, 12)]
    lines = [json.dumps({"messages": chat}) for chat in chats] + [json.dumps({"other": 1})]
    (settings.datasets_folder / "chats.jsonl").write_text("\n".join(lines))
    rows = {"dataset": "local/chats.jsonl", "pack": False, "skip_bad_rows": True}
    result = download(ratio=0.3, calibration=CALIBRATION | rows)
    report = CompressionReport.model_validate_json((result / "report.json").read_bytes())
    rendered = [len(tokenizer.apply_chat_template(chat)["input_ids"]) for chat in chats]
    # Whole conversations, of which those of more than 32 tokens are cut.
    assert report.calibration.tokens <= sum(sorted(min(length, 32) for length in rendered)[-6:])
    assert (report.calibration.samples, report.calibration.skipped_rows) == (6, 1)
