"""What any run needs of its machine: device, processes, checkpoints, logs, signals."""
