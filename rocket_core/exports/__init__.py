"""Files of other engines."""
