"""Attacks by the files of a model: its tokenizer, its chat template, its settings, and pieces of its upload."""

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx2
import psutil

from benchmarks.attacks.target import REQUEST, Target
from tests.reference.hostile_models import edit_json
from tests.reference.tiny_models import VOCAB_SIZE, save_tiny_model

# What a page, and the service while it makes one, may take.
_PAGE_BYTES = 8 * 2**20
_GROWTH_BYTES = 300 * 2**20
_ENDED = frozenset({"succeeded", "failed", "cancelled"})


def decoder_that_multiplies(target: Target) -> str:
    """Let a tokenizer write 200,000 letters for each letter of an answer, and look at the pages about it."""
    folder = _model(target, "decoder")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    replace = {"type": "Replace", "pattern": {"Regex": "."}, "content": "e" * 200_000}
    edit_json(folder / "tokenizer.json", decoder={"type": "Sequence", "decoders": [tokenizer["decoder"], replace]})
    return _look_at_pages(target, "decoder")


def words_of_twenty_kilobytes(target: Target) -> str:
    """Let every token of a vocabulary be long, and look at the pages about its answers."""
    folder = _model(target, "words")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = {word if number < 3 else word + "e" * 20_000: number for word, number in vocabulary.items()}
    words |= {f"{number} {'e' * 20_000}": number for number in range(len(words), VOCAB_SIZE)}
    unknown = list(words)[-1]
    edit_json(folder / "tokenizer.json", model={"type": "WordLevel", "vocab": words, "unk_token": unknown})
    return _look_at_pages(target, "words")


def template_without_end(target: Target) -> str:
    """Submit a chat template of three nested loops, once to its end and once cancelled."""
    folder = _model(target, "template")
    template = "{% for a in range(100000) %}" * 3 + "{% endfor %}" * 3
    edit_json(folder / "tokenizer_config.json", chat_template=template)
    with target.client() as client:
        failed = _ended(client, _submit(client, "template"))
        assert (failed["status"], failed["attempt"]) == ("failed", 1), failed
        return f"failed with {failed['error']['code']} in one attempt; {_cancelled(client, 'template')}"


def tokenizer_without_end(target: Target) -> str:
    """Submit a tokenizer whose regular expression takes hours for a text, once to its end and once cancelled."""
    folder = _model(target, "regex")
    split = {
        "type": "Split",
        "pattern": {"Regex": "(?:[a-z]{1,30}){1,4}[0-9]"},
        "behavior": "Isolated",
        "invert": False,
    }
    multiply = {"type": "Replace", "pattern": {"String": " "}, "content": "a" * 200}
    edit_json(folder / "tokenizer.json", pre_tokenizer=split, normalizer=multiply)
    with target.client() as client:
        failed = _ended(client, _submit(client, "regex", has_prompts=False))
        assert (failed["status"], failed["attempt"]) == ("failed", 1), failed
        return f"failed with {failed['error']['code']} in one attempt; {_cancelled(client, 'regex', has_prompts=False)}"


def settings_of_a_wrong_type(target: Target) -> str:
    """Evaluate models whose settings transformers reads without checking their types."""
    _model(target, "window")
    edit_json(target.models / "window" / "config.json", sliding_window="x")
    _model(target, "stop")
    edit_json(target.models / "stop" / "generation_config.json", eos_token_id="x")  # noqa: S106 - no secret
    with target.client() as client:
        refused = client.post("/estimates", json=REQUEST | {"model_id": "local/window"})
        assert refused.status_code == 422, refused.text
        assert "sliding_window" in refused.json()["detail"], refused.text
        failed = _ended(client, _submit(client, "stop"))
    assert "eos_token_id" in failed["error"]["message"], failed
    return "refused by name of the field"


def pieces_of_one_byte(target: Target) -> str:
    """Upload a model byte by byte, and look at what has arrived."""
    files = [{"path": "config.json", "size": 2}, {"path": "model.safetensors", "size": 2**30}]
    sent: Counter[int] = Counter()
    with target.client() as client:
        client.post("/models", json={"name": "bytes", "files": files}).raise_for_status()
        client.put("/models/bytes/files/config.json", content=b"{}", headers={"Content-Range": "bytes 0-1/2"})
        start = (2**20).to_bytes(8, "little")
        for position in range(300):
            span = f"bytes {position + 7 if position else 0}-{position + 7}/{2**30}"
            content = b"a" if position else start
            answer = client.put(
                "/models/bytes/files/model.safetensors", content=content, headers={"Content-Range": span}
            )
            sent[answer.status_code] += 1
        view = len(client.get("/models/bytes").content)
        client.delete("/models/bytes")
    assert not sent[200], dict(sent)
    return f"{sum(sent.values())} refused; the model's view has {view} bytes"


def _model(target: Target, name: str) -> Path:
    folder = save_tiny_model("llama", target.models / name)
    edit_json(folder / "config.json", max_position_embeddings=2**17)
    return folder


def _submit(client: httpx2.Client, name: str, *, has_prompts: bool = True) -> str:
    evaluate = {"prompts": ["one", "two", "three"], "answer_tokens": 64, "samples": 1, "sequence_length": 16}
    body = REQUEST | {"model_id": f"local/{name}"} | ({"evaluate": evaluate} if has_prompts else {})
    answer = client.post("/jobs", json=body)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def _ended(client: httpx2.Client, job_id: str) -> dict:
    while (job := client.get(f"/jobs/{job_id}").raise_for_status().json())["status"] not in _ENDED:
        time.sleep(0.2)
    return job


def _cancelled(client: httpx2.Client, name: str, *, has_prompts: bool = True) -> str:
    job_id = _submit(client, name, has_prompts=has_prompts)
    while client.get(f"/jobs/{job_id}").json()["stage"] != "preflight":
        time.sleep(0.2)
    time.sleep(5)
    began = time.monotonic()
    client.post(f"/jobs/{job_id}/cancel").raise_for_status()
    job = _ended(client, job_id)
    seconds = time.monotonic() - began
    assert job["status"] == "cancelled", job
    assert seconds < 10, f"{seconds:.1f} s to cancel"
    return f"cancelled within {seconds:.1f} s"


def _look_at_pages(target: Target, name: str) -> str:
    with target.client() as client:
        job = _ended(client, _submit(client, name))
        assert job["status"] == "succeeded", job
        before = _resident(target)
        sizes = {}
        for path in (f"/ui/jobs/{job['id']}", f"/ui/compare?job={job['id']}", f"/ui/model?id=local/{name}"):
            sizes[path.split("?")[0].rpartition("/")[0]] = _read(client, path, "text/html")
        for kind in ("text/html", "application/json"):
            sizes[kind] = _read(client, f"/jobs/{job['id']}/report", kind)
        grown = max(0, _resident(target) - before)
        files = client.get(f"/jobs/{job['id']}/artifacts").json()["data"]
        sizes |= {file["name"]: file["size"] for file in files if file["name"].startswith("report")}
    largest = max(sizes, key=sizes.__getitem__)
    said = f"{largest} has {sizes[largest] / 1e6:.1f} MB, and the service grew by {grown / 1e6:.0f} MB"
    assert sizes[largest] < _PAGE_BYTES, said
    assert grown < _GROWTH_BYTES, said
    return said


def _read(client: httpx2.Client, path: str, kind: str) -> int:
    answer = client.get(path, headers={"Accept": kind})
    assert answer.status_code == 200, (path, answer.status_code)
    return len(answer.content)


def _resident(target: Target) -> int:
    """Return the resident bytes of the process that answers."""
    return psutil.Process(target.service.answering_pid).memory_info().rss


HOSTILE_MODELS: tuple[Callable[[Target], str], ...] = (
    decoder_that_multiplies,
    words_of_twenty_kilobytes,
    template_without_end,
    tokenizer_without_end,
    settings_of_a_wrong_type,
    pieces_of_one_byte,
)
