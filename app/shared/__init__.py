"""Code shared by the web side and the worker: settings, tables, life cycle, queue, storage. No web framework or torch."""
