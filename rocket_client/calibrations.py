"""`rocket calibrations`: what a server offers to calibrate on."""

from rocket_client import options
from rocket_client.defaults import DEFAULT_SERVER
from rocket_client.remote import connected
from rocket_client.rendering import print_names

NAME = "calibrations"


def calibrations(*, server: options.Server = DEFAULT_SERVER, as_json: options.JsonResult = False) -> None:
    """List calibration data, as `rocket submit --calibration` takes it; what `rocket upload` brought is among it."""
    with connected(server, as_json=as_json) as rocket:
        found = rocket.calibrations()
    print_names(found, "calibration data", as_json=as_json)
