"""HTTP: one router per resource, errors as problem documents, and middleware."""
