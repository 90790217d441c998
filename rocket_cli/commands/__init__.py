"""Commands on a model or on a server's jobs; each module is named after its command, or after what it lists."""
