"""Integrations with agent frameworks: one module per framework, imported by name."""
