"""HTTP: one router per noun, the errors as problem documents, and what every request goes through."""
