"""What surrounds the training loop: settings, resume, plan, checks, the run and its log."""
