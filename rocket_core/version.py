"""The version of Rocket."""

__version__ = "0.1.0"
