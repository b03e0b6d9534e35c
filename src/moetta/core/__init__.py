"""The ground floor: what an adapter is, and what every method builds on."""
