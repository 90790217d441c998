"""`rocket mcp`: the service as tools for agents."""

import os
import socket
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from rocket_cli import options
from rocket_cli.connection import hub_token
from rocket_cli.exit_codes import reported_failures
from rocket_client._defaults import COMMAND_PATIENCE, DEFAULT_SERVER
from rocket_client.errors import ProblemError
from rocket_core.errors import InvalidConfigError

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer


class Transport(StrEnum):
    """How agents reach the tools, as an enumeration because typer does not support Literals."""

    STDIO = "stdio"
    HTTP = "http"


Through = Annotated[
    Transport,
    options.option(
        None,
        "stdio: for the agent that starts this command, with the API key of ROCKET_API_KEY; http: for several agents, "
        "each with its own key as `Authorization: Bearer KEY`.",
    ),
]
Host = Annotated[
    str, options.option("ADDRESS", "Address to listen on for http; others than loopback need a service with API keys.")
]
Port = Annotated[int, options.option("N", "Port to listen on for http; 0 picks a free one.", min=0, max=65535)]


def mcp(
    *,
    transport: Through = Transport.STDIO,
    host: Host = "127.0.0.1",
    port: Port = 8001,
    server: options.Server = DEFAULT_SERVER,
    hub_token_env: options.HubTokenVariable = None,
) -> None:
    """Offer the service to agents as tools of the Model Context Protocol."""
    from rocket_cli.agent_tools import Tools, create_server

    token = hub_token(hub_token_env)
    if transport is Transport.STDIO:
        create_server(Tools(server=server, over_http=False, hub_token=token)).run("stdio")
        return
    if token is not None:
        raise typer.BadParameter(
            "over http each agent sends its own, as the header Hub-Token", param_hint="--hub-token-env"
        )
    with reported_failures(as_json=False):
        _serve(create_server(Tools(server=server, over_http=True)), server, host, port)


def _serve(tools: "MCPServer", server: str, host: str, port: int) -> None:
    import uvicorn

    from rocket_client._wire import is_loopback

    is_local = is_loopback(host)
    if not is_local:
        _check_has_keys(server, host)
    # Requests for other hosts are refused, so that no web page can send any to the loopback.
    application = tools.streamable_http_app(stateless_http=True, host="127.0.0.1" if is_local else host)
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise InvalidConfigError(
            f"cannot listen on {host} port {port}: {reason}; choose another with --port (0 picks a free one)"
        ) from error
    with listener:
        shown = f"[{host}]" if ":" in host else host
        typer.echo(f"Tools on http://{shown}:{listener.getsockname()[1]}/mcp")
        uvicorn.Server(uvicorn.Config(application, log_config=None, access_log=False)).run(sockets=[listener])


def _check_has_keys(server: str, host: str) -> None:
    """Raise an error if other machines could use a service that serves everyone on its loopback."""
    from rocket_client import Rocket

    with Rocket(server, api_key="", patience=COMMAND_PATIENCE) as rocket:
        try:
            rocket.list_jobs(limit=1)
        except ProblemError as error:
            if error.code == "unauthenticated":
                return
            raise
    raise InvalidConfigError(
        f"{server} requires no API key, and on {host} other machines could use it; create one with "
        "`rocket admin keys create`"
    )
