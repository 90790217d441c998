"""Confinement of processes that read untrusted files: privileges, files, network, memory.

This does not replace care in the code that reads; it limits the damage of a mistake there. Linux only: elsewhere, and
on kernels without Landlock or seccomp, less is enforced, and `Enforced` says what.
"""

from app.shared.confinement.bubblewrap import bubblewrap_command, bubblewrap_fault
from app.shared.confinement.kernel import become_user, may_change_user
from app.shared.confinement.memory import MemoryGroup, limit_memory
from app.shared.confinement.sandbox import Enforced, Sandbox, SandboxError, close_network, enter_sandbox, supported

__all__ = [
    "Enforced",
    "MemoryGroup",
    "Sandbox",
    "SandboxError",
    "become_user",
    "bubblewrap_command",
    "bubblewrap_fault",
    "close_network",
    "enter_sandbox",
    "limit_memory",
    "may_change_user",
    "supported",
]
