"""Commands that run the service or its parts: the only place that imports both `app` and `worker`."""
