"""`rocket` in a process that has imported everything already, forked for each call.

Most of a short command's time is imports, and reading the built-in text. A template does both once; a script named
`rocket`, first on the PATH, asks it to fork a process that takes over arguments, environment, folder and standard
streams, and calls what the console script calls.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]

CLIENT = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    asked = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode() + b"\\n"
    socket.send_fds(server, [asked[:1]], [0, 1, 2])
    server.sendall(asked[1:])
    sys.exit((server.recv(1) or b"\\xff")[0])
"""


class WarmCommand:
    """A script `rocket`, and the template that runs it.

    Args:
        folder: an empty folder for the script and a socket; to be put first on the PATH.
        environment: of the template, in which libraries are imported.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        address = folder / "socket"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(address))
        self._listening.listen()
        script = folder / "rocket"
        script.write_text(CLIENT.format(python=sys.executable, address=str(address)))
        script.chmod(0o755)
        descriptor = self._listening.fileno()
        command = [sys.executable, "-m", __name__, str(descriptor)]
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[descriptor])

    def close(self) -> None:
        """End the template; commands that it runs have ended."""
        self._process.kill()
        self._process.wait()
        self._listening.close()


def serve(listening: socket.socket) -> None:
    """Import what commands need, then fork a process for each connection."""
    gc.disable()
    import rocket_cli.main
    import rocket_core.pipeline  # noqa: F401
    from rocket_core.calibration.datasets import builtin_documents

    builtin_documents()
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            code = 1
            try:
                code = _run(rocket_cli.main.main, connection)
            except Exception:  # noqa: BLE001 - as an interpreter does
                traceback.print_exc()
            finally:
                connection.sendall(bytes([code]))
                os._exit(code)
        connection.close()


def _run(main, connection: socket.socket) -> int:
    asked, streams, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as rest:
        arguments, folder, environment = json.loads(asked + rest.readline())
    for stream, descriptor in enumerate(streams):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    code: object = 0
    try:
        main(arguments)
    except SystemExit as error:
        code = error.code
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
