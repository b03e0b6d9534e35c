"""Test-time adaptation under mixed distribution shifts."""

__version__ = "0.1.0"
