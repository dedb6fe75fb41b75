"""Times of PyTorch's training steps. It imports torch, and Horovod nowhere."""
