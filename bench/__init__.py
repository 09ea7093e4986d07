"""The speed of training and of its parts, measured side by side: `python -m bench`."""
