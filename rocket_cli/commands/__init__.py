"""Commands on a model or on a server's jobs; each file is named after the command, or after what it lists."""
