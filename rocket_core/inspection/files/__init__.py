"""Files of models that nobody vouches for: names, sizes, JSON, headers and unsafe settings. Loads no torch."""
