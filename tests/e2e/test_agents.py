"""An agent's task from beginning to end, with `rocket mcp` and a model that is actually compressed."""

import asyncio
import os
from pathlib import Path

from mcp import Client
from mcp.client.stdio import StdioServerParameters

from tests.e2e.conftest import MODEL
from tests.e2e.service_process import ROCKET, Service

REQUEST = {"model_id": "local/tiny-llama", "target_bytes": 2_800_000, "calibration_samples": 8, "accept": {"max_kl": 1}}


def test_an_agent_compresses_the_bundled_model(tmp_path):
    (tmp_path / "data" / "models").mkdir(parents=True)
    (tmp_path / "data" / "models" / MODEL.name).symlink_to(MODEL)
    service = Service(tmp_path / "data")
    try:
        report, files = asyncio.run(task(service.url, tmp_path / "smaller"))
        whole = service.client.get(f"/jobs/{report['job_id']}/report").json()
    finally:
        service.close()
    weights = (tmp_path / "smaller" / "rocket" / "model.safetensors").stat().st_size
    assert files["rocket/model.safetensors"] == weights <= REQUEST["target_bytes"]
    assert report["exports"] == {"rocket": report["stored_bytes"]}
    assert report["dense_bytes"] == whole["totals"]["dense_bytes"]
    assert report["kl_divergence"] == whole["evaluation"]["difference"]["kl_divergence"]
    assert 0 < report["kl_divergence"] < 1
    perplexities = [whole["evaluation"][of]["perplexity"] for of in ("before", "after")]
    assert [report["perplexity_before"], report["perplexity_after"]] == perplexities
    assert report["verdict"].startswith("accepted")
    losses = sorted((layer["loss"] for layer in whole["layers"] if layer["kind"] != "dense"), reverse=True)
    assert [layer["predicted_loss"] for layer in report["worst_layers"]] == losses[:5]


async def task(server: str, folder: Path):
    """Return the short report and the files of a compression that an agent asks for."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ROCKET_")}
    command = StdioServerParameters(command=str(ROCKET), args=["mcp", "--server", server], env=kept)
    async with Client(command) as agent:

        async def call(tool, **arguments):
            answer = await agent.call_tool(tool, arguments)
            assert not answer.is_error, answer.content
            return answer.structured_content

        job = await call("submit", request=REQUEST)
        while job["status"] in {"queued", "running"}:
            job = await call("watch", job_id=job["job_id"])
        assert (job["status"], job["quality_is_measured"]) == ("succeeded", True), job
        report = await call("report", job_id=job["job_id"])
        downloaded = await call("download", job_id=job["job_id"], folder=str(folder), export="rocket")
        return report, downloaded["files"]
