"""What is on disk, in which format: models, checkpoints, metrics; finding and loading them."""
