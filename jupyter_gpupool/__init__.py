"""Share a pool of GPUs from notebooks."""

__version__ = "0.1.0"
