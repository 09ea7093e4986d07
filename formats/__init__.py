"""On-disk formats of models, checkpoints and metrics, and how to find and load them."""
