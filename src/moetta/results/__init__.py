"""Results: runs on disk, what several seeds say together, and the tables made of them."""
