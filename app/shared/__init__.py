"""What web side and worker share: settings, rows, life cycle, queue, files. No web framework and no torch."""
