"""Clients of the Rocket service: `from rocket_client import Rocket, AsyncRocket`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rocket_client.async_client import AsyncRocket
    from rocket_client.client import Rocket

__all__ = ["AsyncRocket", "Rocket"]


def __getattr__(name: str) -> Any:
    # Lazily: commands that do not talk to a server need not load the HTTP library.
    if name == "Rocket":
        from rocket_client.client import Rocket

        return Rocket
    if name == "AsyncRocket":
        from rocket_client.async_client import AsyncRocket

        return AsyncRocket
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
