"""The trials that every method can be put through."""
