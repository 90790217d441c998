"""Code shared by web side and worker: settings, tables, life cycle, queue, storage. No web framework or torch."""
