"""Files of untrusted models: names, sizes, JSON, headers and unsafe settings. Loads no torch."""
