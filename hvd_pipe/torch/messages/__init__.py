"""What travels between ranks: buckets of gradients, and how each is reduced."""
