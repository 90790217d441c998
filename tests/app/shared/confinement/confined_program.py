"""Running a program that confines itself, which cannot be undone."""

import subprocess
import sys
import textwrap
from pathlib import Path

import app

ROOT = Path(app.__file__).parents[1]

PRELUDE = """
import ctypes, errno, fcntl, os, resource, signal, socket, sys, threading, time
from pathlib import Path
from app.shared.confinement import Sandbox, SandboxError, close_network, enter_sandbox, limit_memory, supported

def attempt(action):
    try:
        return action()
    except OSError as error:
        return type(error).__name__

def call(number, *arguments):
    # All system calls that a test makes by number are x86-64's.
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *wide)
    return errno.errorcode[ctypes.get_errno()] if result < 0 else result
"""


def run(code, *arguments, before="", **options):
    """Return the lines that a program prints which confines itself.

    Args:
        code: the program.
        arguments: its arguments.
        before: code that it runs first.
        options: of `subprocess.run`.
    """
    program = PRELUDE + textwrap.dedent(before) + textwrap.dedent(code)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"} | options.pop("env", {})
    result = subprocess.run(
        [sys.executable, "-P", "-c", program, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=180,
        env=environment,
        **options,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()
