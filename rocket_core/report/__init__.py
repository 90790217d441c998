"""Report, figures, HTML page and model card. Loads no torch."""
