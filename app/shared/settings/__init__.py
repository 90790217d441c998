"""The settings of the service: one class, read from the environment, that rejects invalid values."""

from app.shared.settings.loading import SettingRow, deprecated_variables, describe, load_settings
from app.shared.settings.model import DEFAULT_DATA_DIR, Settings

__all__ = ["DEFAULT_DATA_DIR", "SettingRow", "Settings", "deprecated_variables", "describe", "load_settings"]
