"""Files in the formats of other engines."""
