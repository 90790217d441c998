"""What can be known of a model without loading its weights. Loads no torch."""
