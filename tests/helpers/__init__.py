"""What the tests share: tiny models, the trials of every method, plain reference code."""
