"""Everything around the training loop: settings, resuming, planning, checks, run and log."""
