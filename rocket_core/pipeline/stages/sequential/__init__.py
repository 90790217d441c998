"""Sequential compression: each layer is compressed for the inputs that the compressed layers before it produce."""
