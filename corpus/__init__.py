"""Where documents come from, and the token files that they become."""
