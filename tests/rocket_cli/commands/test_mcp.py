"""`rocket mcp`: what agents can do with its tools, through the protocol's own client, and with whose key."""

import asyncio
import json
import os
import subprocess
from contextlib import asynccontextmanager, contextmanager

import httpx2
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from app.shared.repositories import keys, outputs
from rocket_cli.agent_tools import Tools, create_server
from rocket_cli.commands.mcp import _check_has_keys
from rocket_client import Rocket
from rocket_client.errors import ProblemError
from tests.e2e.service_process import ROCKET
from tests.loopback_service import in_background
from tests.rocket_cli.fakes import build_report

FILES = {"rocket/model.safetensors": b"weights" * 1000, "gguf/model.gguf": b"x", "report.json": b"{}"}
TOKEN = "hf_canary0123456789"  # noqa: S105 - not a real one


@asynccontextmanager
async def connected(target, headers=None, mode="auto"):
    """Yield the protocol's client of an address, of a command line, or of a server in this process.

    Clients of versions before 2026 need the mode `legacy`.
    """
    if not isinstance(target, str):
        async with Client(target, mode=mode) as client:
            yield client
        return
    async with (
        httpx2.AsyncClient(headers=headers, trust_env=False, timeout=30) as http,
        Client(streamable_http_client(target, http_client=http), mode=mode) as client,
    ):
        yield client


def called(target, tool, arguments, headers=None, mode="auto", **options):
    """Return whether a call failed, and its answer: a text, or the structured content."""

    async def call():
        async with connected(target, headers, mode) as client:
            answer = await client.call_tool(tool, arguments, **options)
            if answer.is_error:
                return True, answer.content[0].text
            # The text is for clients that know no structured content.
            assert json.loads(answer.content[0].text) or answer.content[1:]
            return False, answer.structured_content

    return asyncio.run(call())


@pytest.fixture
def tools(server):
    return create_server(Tools(server=server.url, over_http=False, hub_token=TOKEN))


@pytest.fixture
def ask(tools):
    """Return a function that calls a tool, which must succeed, and returns its answer."""

    def ask(tool, **arguments):
        is_error, answer = called(tools, tool, arguments)
        assert not is_error, answer
        return answer

    return ask


def fails(tools, tool, **arguments):
    is_error, text = called(tools, tool, arguments)
    assert is_error, text
    return text


@pytest.fixture
def finished(service):
    return service.succeeded(FILES, report=build_report())


@contextmanager
def over_http(server, *more, **environment):
    """Run the command for several agents, and yield its address."""
    command = [str(ROCKET), "mcp", "--transport", "http", "--port", "0", "--server", server.url, *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("Tools on "), line
            yield line.removeprefix("Tools on ").strip()
        finally:
            process.terminate()


def test_every_tool_says_what_it_does_and_in_which_units(tools):
    async def listed():
        async with connected(tools) as client:
            assert "bytes" in client.instructions
            return (await client.list_tools()).tools

    found = {tool.name: tool for tool in asyncio.run(listed())}
    assert set(found) == {
        *("models", "estimate", "profile", "frontier", "submit"),
        *("watch", "report", "compare", "download", "push"),
    }
    for tool in found.values():
        assert "\n  " not in tool.description
        assert tool.output_schema is not None
        schemas = [tool.input_schema, *tool.input_schema.get("$defs", {}).values()]
        described = [one for schema in schemas for one in schema.get("properties", {}).values() if "$ref" not in one]
        assert all(one.get("description") or "$ref" in str(one) for one in described), tool.name
    creating = {name for name, tool in found.items() if not tool.annotations.read_only_hint}
    assert creating == {"profile", "submit", "download", "push"}


def test_a_submission_is_that_of_the_client(ask, client):
    request = {"model_id": "local/tiny", "target_bytes": 3_000_000, "preset": "instant", "engine": "llama.cpp"}
    state = ask("submit", request=request | {"accept": {"max_kl": 0.1}}, idempotency_key="once")
    again = ask("submit", request=request | {"accept": {"max_kl": 0.1}}, idempotency_key="once")

    job = client.get_job(state["job_id"])
    assert again["job_id"] == job.id
    assert (job.target_bytes, job.options["preset"], job.options["engine"]) == (3_000_000, "instant", "llama.cpp")
    assert (job.evaluate is not None, job.accept.max_kl) == (True, 0.1)
    assert (state["status"], state["target"], state["progress"]) == ("queued", "≤ 3.00 MB", 0)
    assert "watch" in state["next_step"]
    unmeasured = ask("submit", request={"model_id": "local/tiny", "ratio": 0.5, "evaluate": False})
    assert client.get_job(unmeasured["job_id"]).evaluate is None


def test_a_memory_with_a_context_is_a_target(ask, client):
    fit = {"memory_bytes": 10_300_000, "context": 16, "batch": 2}
    job = client.get_job(ask("submit", request={"model_id": "local/tiny", "fit": fit})["job_id"])

    assert job.fit.model_dump(exclude_none=True) == fit


def test_an_estimate_is_that_of_the_service(ask, client):
    estimated = ask("estimate", request={"model_id": "local/tiny", "ratio": 0.3, "calibration_samples": 8})

    expected = client.estimate("local/tiny", ratio=0.3, calibration={"samples": 8}, evaluate={})
    measured = ("memory_bytes", "disk_bytes", "kept_parameters", "calibration_tokens", "seconds")
    assert [estimated[name] for name in measured] == [getattr(expected, name) for name in measured]
    assert [model["id"] for model in ask("models")["result"]] == ["local/tiny"]


@pytest.mark.parametrize("settings", [{"ratio": 1.3}, {"bits": 0}, {"ratio": 0.3, "calibration_dataset": "local/no"}])
def test_a_refusal_of_the_service_is_the_error_of_the_tool(tools, client, settings):
    text = fails(tools, "submit", request={"model_id": "local/tiny"} | settings)

    arguments = {name: settings[name] for name in settings.keys() & {"ratio", "bits"}}
    dataset = {name: settings[f"calibration_{name}"] for name in ("dataset",) if f"calibration_{name}" in settings}
    with pytest.raises(ProblemError) as refused:
        client.submit("local/tiny", calibration=dataset, **arguments)
    assert text == f"Error executing tool submit: {refused.value}"


def test_errors_before_a_request_say_what_to_do(tools, finished):
    assert "specify one of ratio, target_bytes" in fails(tools, "submit", request={"model_id": "local/tiny"})
    assert "request.ratoi" in fails(tools, "submit", request={"model_id": "local/tiny", "ratoi": 0.3})
    assert "not a job id" in fails(tools, "watch", job_id="../keys")
    assert "no job" in fails(tools, "report", job_id=f"job_{'0' * 26}")
    assert "absolute path" in fails(tools, "download", job_id=finished, folder="here")
    assert "cannot write to" in fails(tools, "download", job_id=finished, folder="/proc/nothing")
    absent = create_server(Tools(server="http://127.0.0.1:9", over_http=False))
    assert "does not answer" in fails(absent, "models")


@pytest.mark.parametrize("way", ["in process", "http", "http of old clients"])
def test_watching_ends_with_the_job_and_reports_progress(tools, service, server, stack, way):
    job_id, told = service.submit(), []
    target = tools if way == "in process" else stack.enter_context(over_http(server))
    lease = service.claim(job_id)

    async def on_progress(progress, total, message):
        told.append((progress, total, message))
        # The job ends once its progress was seen.
        if progress == 0.5:
            await asyncio.to_thread(service.succeed, lease, FILES)

    with in_background(lambda: service.progress(lease, "calibrating", 0.5)):
        mode = "legacy" if way == "http of old clients" else "auto"
        arguments = {"job_id": job_id, "wait_seconds": 30}
        is_error, state = called(target, "watch", arguments, mode=mode, progress_callback=on_progress)
    assert (is_error, state["status"], state["quality"]) == (False, "succeeded", "10 → 10.2")
    assert (0.5, 1.0) in [entry[:2] for entry in told]
    assert "report" in state["next_step"]


def test_watching_a_job_that_lasts_returns_in_time(ask, service):
    job_id = service.submit()

    assert ask("watch", job_id=job_id, wait_seconds=0)["status"] == "queued"
    state = ask("watch", job_id=job_id, wait_seconds=0.2)
    assert (state["status"], state["next_step"]) == ("queued", "call watch with this job_id until it has ended")


def test_a_failed_job_says_why(ask, service):
    job_id = service.submit()
    service.fail(service.claim(job_id))

    state = ask("watch", job_id=job_id)
    assert (state["status"], state["error"]) == ("failed", "a file is damaged")
    assert "change what the error names" in state["next_step"]


def test_jobs_and_profiles_have_the_same_sizes(ask, tools, service, client):
    lease = service.claim(service.submit(ratio=None))
    profile_id = service.profile_model(lease)
    service.do(outputs.succeed_without_files, lease)

    assert "frontier" in ask("watch", job_id=lease.job_id)["next_step"]
    found = ask("frontier", job_or_profile=lease.job_id)
    assert ask("frontier", job_or_profile=profile_id) == found
    points = client.frontier(profile_id).data
    expected = [(point.model_bytes, point.error) for point in [*points[:-1:5], points[-1]]]
    assert [(size["model_bytes"], size["predicted_error"]) for size in found["sizes"]] == expected
    assert found["dense_bytes"] == 612
    assert "relative errors of all outputs" in found["error_means"]
    assert "has no profile" in fails(tools, "frontier", job_or_profile=service.submit())
    assert ask("profile", request={"model_id": "local/tiny"})["kind"] == "profile"


def test_the_report_is_short_and_names_the_worst_layers(ask, finished):
    found = ask("report", job_id=finished)

    assert (found["stored_bytes"], found["dense_bytes"]) == (12_340_000, 16_000_000)
    assert (found["kl_divergence"], found["verdict"]) == (None, None)
    assert "predicted, not measured" in found["quality"]
    assert [layer["output_error"] for layer in found["worst_layers"]] == [0.125, 0.125]
    assert len(json.dumps(found)) < 2000


def test_results_are_compared_in_the_given_order(ask, tools, service, finished):
    other = service.succeeded(FILES, report=build_report(blocks=1))

    assert [result["job_id"] for result in ask("compare", job_ids=[other, finished])["result"]] == [other, finished]
    assert "at least 2" in fails(tools, "compare", job_ids=[finished])


def test_files_arrive_in_the_folder(ask, finished, tmp_path):
    found = ask("download", job_id=finished, folder=str(tmp_path / "smaller"), export="gguf")

    assert found == {"folder": str(tmp_path / "smaller"), "files": {"gguf/model.gguf": 1, "report.json": 2}}
    assert (tmp_path / "smaller/gguf/model.gguf").read_bytes() == b"x"


def test_a_push_is_private_and_has_the_token_of_the_command(ask, server, client, finished):
    state = ask("push", job_id=finished, repository="alice/small")

    (push,) = client.pushes(finished)
    assert (state["job_id"], state["kind"], push.job.push.private) == (push.job.id, "push", True)
    without = create_server(Tools(server=server.url, over_http=False))
    assert "Hub" in fails(without, "push", job_id=finished, repository="alice/small")


def test_over_stdio_the_key_is_that_of_the_environment(service, server):
    key = service.do(keys.create_key, "alice").text

    def models(**environment):
        options = {"command": str(ROCKET), "args": ["mcp", "--server", server.url]}
        return called(StdioServerParameters(**options, env=dict(os.environ) | environment), "models", {})

    assert models(ROCKET_API_KEY=key) == (False, {"result": [{"id": "local/tiny", "problem": None}]})
    wrong = models(ROCKET_API_KEY=f"rk_{'0' * 16}_{'0' * 64}")
    assert wrong == (True, "Error executing tool models: the API key is unknown, expired or revoked")
    assert "requires an API key" in models()[1]


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_over_http_each_agent_acts_with_its_own_key(service, server, mode):
    owned = {name: service.do(keys.create_key, name).text for name in ("alice", "bob")}

    # The command's own key must not be anyone's.
    with over_http(server, ROCKET_API_KEY=owned["alice"]) as address:
        headers = {name: {"Authorization": f"Bearer {key}"} for name, key in owned.items()}
        request = {"model_id": "local/tiny", "ratio": 0.3}
        is_error, state = called(address, "submit", {"request": request}, headers["bob"], mode)
        assert not is_error, state
        with Rocket(server.url, api_key=owned["bob"]) as bob, Rocket(server.url, api_key=owned["alice"]) as alice:
            assert [job.id for job in bob.list_jobs().data] == [state["job_id"]]
            assert alice.list_jobs().data == ()
        watched = {"job_id": state["job_id"], "wait_seconds": 0}
        assert called(address, "watch", watched, headers["bob"], mode)[0] is False
        assert "no job" in called(address, "watch", watched, headers["alice"], mode)[1]
        for headers in ({}, {"Authorization": owned["alice"]}, {"Authorization": f"Basic {owned['alice']}"}):
            is_error, text = called(address, "models", {}, headers, mode)
            assert (is_error, "requires an API key; send `Authorization: Bearer" in text) == (True, True)
        wrong = {"Authorization": f"Bearer rk_{'0' * 16}_{'0' * 64}"}
        assert "unknown, expired or revoked" in called(address, "models", {}, wrong, mode)[1]


def test_over_http_nothing_is_written_and_tokens_are_the_agents(server, client, finished):
    with over_http(server) as address:
        arguments = {"job_id": finished, "repository": "alice/small"}
        assert "Unknown tool" in called(address, "download", {"job_id": finished, "folder": "/nowhere"})[1]
        assert called(address, "push", arguments)[0] is True
        assert called(address, "push", arguments, {"Hub-Token": TOKEN})[0] is False
        # A page in a browser that resolves its name to the loopback sends that name.
        refused = httpx2.post(address, json={}, headers={"Host": "evil.example"}, trust_env=False)
        assert refused.status_code == 421
    assert len(client.pushes(finished)) == 1


def test_a_service_without_keys_stays_on_the_loopback(remote, service, server):
    everywhere = "0.0.0.0"  # noqa: S104 - never bound here
    outcome = remote("mcp", "--transport", "http", "--host", everywhere, "--port", "0")
    assert (outcome.code, outcome.out) == (2, "")
    assert "requires no API key, and on 0.0.0.0 other machines could use it" in outcome.err
    assert remote("mcp", "--transport", "http", "--hub-token-env", "PATH").code == 2
    service.do(keys.create_key, "alice")
    _check_has_keys(server.url, everywhere)


def test_a_port_in_use_is_named(remote, server):
    port = server.url.rpartition(":")[2]
    outcome = remote("mcp", "--transport", "http", "--port", port)
    assert (outcome.code, f"port {port}" in outcome.err) == (2, True)
